"""The weight files of a Hugging Face folder: names, shapes and content identity, without reading the weights.

Only safetensors, one file or sharded with an index. A file that is cut short is refused here.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from twinpool.engine.errors import UnsupportedModel

DTYPES: Mapping[str, torch.dtype] = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
SAMPLE_BYTES = 1024
IGNORED_CONFIG_KEYS = frozenset({"_name_or_path", "transformers_version", "_commit_hash"})


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored tensor. ``start`` and ``end`` are byte offsets in ``file``."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All stored tensors by name, and the files that hold them."""

    folder: Path
    files: tuple[Path, ...]
    entries: Mapping[str, Entry]

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Reads index and headers.

        Raises:
            UnsupportedModel: no safetensors files, a missing, broken or truncated file, or a tensor stored twice.
        """
        files = _files(folder)
        entries: dict[str, Entry] = {}
        for file in files:
            for entry in _read_header(file):
                if entry.name in entries:
                    raise UnsupportedModel(f"{entry.name} is stored in both {entries[entry.name].file} and {file}")
                entries[entry.name] = entry
        return cls(folder, files, entries)

    def fingerprint(self) -> str:
        """Identifies the content: 32 hex digits, equal on all machines, in time proportional to the number of tensors.

        Covers config.json, every file's name, size and tensor table, and a sample from the middle of every tensor, so
        that a fine-tuned copy with equal shapes differs from its base.
        """
        digest = hashlib.sha256()
        config = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        kept = {key: value for key, value in config.items() if key not in IGNORED_CONFIG_KEYS}
        digest.update(json.dumps(kept, sort_keys=True).encode())
        for path in self.files:
            digest.update(f"{path.name}:{path.stat().st_size}\n".encode())
            with path.open("rb") as file:
                for entry in sorted((e for e in self.entries.values() if e.file == path), key=lambda e: e.start):
                    digest.update(f"{entry.name}:{entry.dtype}:{entry.shape}\n".encode())
                    size = min(SAMPLE_BYTES, entry.end - entry.start)
                    file.seek(entry.start + (entry.end - entry.start - size) // 2)
                    digest.update(file.read(size))
        return digest.hexdigest()[:32]


def _files(folder: Path) -> tuple[Path, ...]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise UnsupportedModel(f"{index} is broken: {error!r}; download it again") from error
        files = tuple(folder / name for name in names)
        if missing := [file.name for file in files if not file.is_file()]:
            raise UnsupportedModel(f"{folder} lacks weight files of its index: {', '.join(missing)}; download them")
        return files
    single = folder / "model.safetensors"
    if single.is_file():
        return (single,)
    raise UnsupportedModel(f"{folder} has no model.safetensors and no index; only safetensors weights are supported")


def _read_header(path: Path) -> list[Entry]:
    """Tensors of one file: 8 bytes of header length (little endian), a JSON header, then the data."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        data = 8 + length
        if data > size:
            raise UnsupportedModel(f"{path} is cut short or not a safetensors file; download it again")
        header = file.read(length)
    try:
        tensors = json.loads(header)
        entries = [
            Entry(
                name=name,
                file=path,
                dtype=str(info["dtype"]),
                shape=tuple(int(n) for n in info["shape"]),
                start=data + int(info["data_offsets"][0]),
                end=data + int(info["data_offsets"][1]),
            )
            for name, info in tensors.items()
            if name != "__metadata__"
        ]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise UnsupportedModel(f"{path} has a broken header: {error!r}; download it again") from error
    for entry in entries:
        if entry.end > size:
            raise UnsupportedModel(f"{path} is cut short ({size} bytes, {entry.name} ends at {entry.end}); download it")
        dtype = DTYPES.get(entry.dtype)
        if dtype is not None and entry.end - entry.start != math.prod(entry.shape) * dtype.itemsize:
            raise UnsupportedModel(f"{path}: shape and size of {entry.name} differ; download it again")
    return entries
