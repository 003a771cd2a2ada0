"""What of ``scripts/gpu_check`` needs no GPU: arguments, report, models made on the fly, the engine's measurements."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest
import torch
from gpu_engine import engine_times, exactness, pools
from gpu_report import Row, as_json, guarded, table

SCRIPT = Path(__file__).parents[3] / "scripts" / "gpu_check"
CPU = torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_it_says_that_it_ran_nothing():
    done = subprocess.run([sys.executable, "-P", str(SCRIPT)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "no CUDA device: nothing was run\n")


def test_arguments():
    loader = SourceFileLoader("gpu_check", str(SCRIPT))
    module = module_from_spec(spec_from_loader("gpu_check", loader))
    loader.exec_module(module)
    assert module.arguments([]).parts == ["contract", "times", "engine", "pools"]
    assert module.arguments(["--only", "times,pools", "--minutes", "3"]).parts == ["times", "pools"]
    with pytest.raises(SystemExit):
        module.arguments(["--only", "attention"])


def test_a_failing_check_is_a_row_of_the_report():
    def fails():
        raise ZeroDivisionError("by\nzero")

    rows = [Row("a", "longer case", "1.5 ms", True, {"ms": 1.5}), *guarded("b", fails), Row("c", "", "3")]
    lines = table(rows).splitlines()
    assert lines[1].split() == ["a", "longer", "case", "1.5", "ms", "ok"]
    assert lines[2].split() == ["b", "ZeroDivisionError", "by", "zero", "FAIL"]
    assert lines[-1] == "3 rows, 1 failed"
    assert json.loads(as_json(rows, {"device": "x"}))["rows"][0]["figures"] == {"ms": 1.5}


def test_tuned_tiles_are_reported_with_what_they_gain():
    pytest.importorskip("triton")
    from gpu_kernels import tuned_rows

    from twinpool.kernels.tiles import Tiles, TileShape, Tuning

    tiles = Tiles(TileShape(16, 128, 4, 3), TileShape(128, 32, 8, 3), 8)
    rows = tuned_rows("model", Tuning(tiles, {"decode": (0.3, 0.2), "prefill": (1.0, 1.0)}), 9.04)
    assert rows[0].result == (
        "16 × 128, 4 warps, 3 stages, 8 programs per processor: 0.200 ms; default 0.300 (1.50 times)"
    )
    assert [row.ok for row in rows] == [None, None, True]
    assert rows[2].result == "9.0 s"


def test_engine_checks_run_on_a_cpu(tiny_llama):
    assert [row.ok for row in exactness(CPU, tiny_llama)] == [True, True]
    rows = engine_times(CPU, tiny_llama, 1e10, (1, 3), length=70)
    assert [row.case for row in rows[1::2]] == ["1 × 70", "3 × 70"]
    assert all(value > 0 for row in rows for value in row.figures.values())


@pytest.mark.slow
def test_pools_check_runs_on_a_cpu(tiny_llama):
    (row,) = pools(CPU, tiny_llama, "nccl")
    assert row.ok, row
