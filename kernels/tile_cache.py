"""Keeps tuned attention tiles in the cache folder, so that a device is timed once.

1. ``tuned_tiles`` looks for a file that was made on the same device, by the same Triton and the same sources, for the
   same workload. What is corrupt, or names a tile that is no candidate, is not believed.
2. If there is none it has the tiles timed, and publishes them by a rename. What ran out of time is used and not kept:
   the next start finds its kernels compiled, and gets further.

Ranks, and workers on equal devices, may do this at the same time; the last one's file stays.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import torch
import triton

from twinpool.kernels.tile_tuning import TIME_LIMIT_S, decode_shapes, prefill_shapes
from twinpool.kernels.tiles import PROGRAMS_PER_PROCESSOR, AttentionWorkload, Tiles, Tuning

log = logging.getLogger(__name__)

SOURCES = ("triton_attention.py", "paged_attention.py", "tiles.py", "tile_tuning.py")
"""Files that decide how fast a tile is."""


@dataclass(frozen=True, slots=True)
class Environment:
    """What a measurement holds for."""

    device: str
    capability: tuple[int, int]
    triton: str
    sources: str

    @classmethod
    def of(cls, device: torch.device) -> Environment:
        """Of a CUDA device."""
        capability = torch.cuda.get_device_capability(device)
        return cls(torch.cuda.get_device_name(device), capability, triton.__version__, sources_hash())


def sources_hash() -> str:
    """Of ``SOURCES``."""
    key = hashlib.sha256()
    for name in SOURCES:
        key.update(Path(__file__).with_name(name).read_bytes())
    return key.hexdigest()[:16]


def tuned_tiles(work: AttentionWorkload, environment: Environment, folder: Path, tune: Callable[[], Tuning]) -> Tiles:
    """Tiles from ``folder``, or the result of ``tune``, which is written there if it is whole."""
    identity = {"environment": asdict(environment), "workload": asdict(work)}
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    file = folder / f"tiles-{key}.json"
    if (kept := _read(file, identity, work)) is not None:
        log.info("attention tiles: %s, from %s", kept, file)
        return kept
    tuning = tune()
    gains = ", ".join(f"{name} {default:.3f} -> {best:.3f}" for name, (default, best) in tuning.milliseconds.items())
    log.info("attention tiles: %s; ms from default to best: %s", tuning.tiles, gains)
    if tuning.whole:
        _write(file, identity, tuning.tiles)
    else:
        log.warning("timing attention's tiles took over %.0f s; the next start goes on with it", TIME_LIMIT_S)
    return tuning.tiles


def _read(file: Path, identity: dict[str, Any], work: AttentionWorkload) -> Tiles | None:
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    # Through JSON, so that tuples compare as what they become.
    if not isinstance(content, dict) or content.get("identity") != json.loads(json.dumps(identity)):
        return None
    decode = next((shape for shape in decode_shapes(work) if [*astuple(shape)] == content.get("decode")), None)
    prefill = next((shape for shape in prefill_shapes(work) if [*astuple(shape)] == content.get("prefill")), None)
    programs = next((count for count in PROGRAMS_PER_PROCESSOR if count == content.get("programs_per_processor")), None)
    if decode is None or prefill is None or programs is None:
        return None
    return Tiles(decode, prefill, programs)


def _write(file: Path, identity: dict[str, Any], tiles: Tiles) -> None:
    assert tiles.decode is not None
    assert tiles.prefill is not None
    content = {
        "identity": identity,
        "decode": astuple(tiles.decode),
        "prefill": astuple(tiles.prefill),
        "programs_per_processor": tiles.programs_per_processor,
    }
    made = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        made.write_text(json.dumps(content, indent=1))
        made.replace(file)
    except OSError as error:
        log.warning("the tiles are not kept, so the next start times them again: %s", error)
