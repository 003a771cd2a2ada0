"""The measurements run, go the ways that they say, and leave no process behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def bench(*arguments: str) -> Any:
    command = [sys.executable, "-P", "-m", "twinpool", "bench", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_handover(tiny_llama: Path) -> None:
    options = ["--tokens", "40", "--pairs", "2", "--streams", "2", "--long-tokens", "100", "--long-requests", "1"]
    found = bench("handover", "--model", str(tiny_llama), "--set", "prefill.engine.prefill_chunk=32", *options)
    assert found["transport"]
    assert found["bytes"] > 0
    assert found["ttft_ms"]["difference"]["count"] == 2
    assert found["idle"]["handover_ms"]["median"] > 0
    assert found["beside_streams"]["decode_step_ms"]["median"] > 0
    assert 0 < found["long"]["exposed_share_of_transfer"] < 1


@pytest.mark.slow
def test_transfer() -> None:
    pytest.importorskip("nixl")
    found = bench("transfer", "--blocks", "4,16", "--rounds", "2")
    for name, transport in (("shared_memory", "nixl/shm"), ("tcp", "nixl/tcp")):
        assert found[name]["transport"] == transport
        assert [size["blocks"] for size in found[name]["sizes"]] == [4, 16]
        assert all(size["share_of_raw"] > 0 for size in found[name]["sizes"])
