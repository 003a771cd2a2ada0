"""Runs ``interpreted/`` in a process of its own, whose Triton interprets kernels on CPU tensors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"
pytest.importorskip("triton")


@pytest.mark.parametrize("selection", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_kernels_equal_the_reference(selection):
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "pytest", str(FOLDER), "-m", selection, "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, env=environment, cwd=FOLDER.parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
