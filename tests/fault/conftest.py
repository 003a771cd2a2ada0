"""One deployment of two and two for all tests that kill, stop and drain; healed before each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusters import Cluster


@pytest.fixture(scope="session")
def pace() -> dict[str, object]:
    """Leases quick enough for tests, slow enough for a busy machine."""
    return {"session.report_interval_s": 0.1, "session.suspect_after_s": 0.5, "session.dead_after_s": 1.5}


@pytest.fixture(scope="session")
def long_llama(tmp_path_factory: pytest.TempPathFactory, make_tiny_llama: Any) -> Path:
    """A tiny Llama with room for long prompts and answers."""
    folder: Path = make_tiny_llama(tmp_path_factory.mktemp("long-llama"), max_position_embeddings=4096)
    return folder


@pytest.fixture(scope="session")
def running_farm(
    tmp_path_factory: pytest.TempPathFactory, long_llama: Path, pace: dict[str, object]
) -> Iterator[Cluster]:
    settings: dict[str, object] = {
        **pace,
        "model.dtype": "float32",
        "prefill.engine.prefill_chunk": 64,
        "prefill.engine.num_blocks": 900,
        "decode.engine.num_blocks": 900,
    }
    cluster = Cluster.of(tmp_path_factory.mktemp("farm"), long_llama, 2, 2, settings)
    with cluster.running():
        yield cluster


@pytest.fixture
async def farm(running_farm: Cluster) -> Cluster:
    """The shared deployment, whole: every worker alive and linked, everything free. ``overrides`` are reset."""
    running_farm.overrides.clear()
    await running_farm.heal()
    return running_farm
