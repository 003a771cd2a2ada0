"""What the wheel holds: every package under its import name, the wire's sources, nothing else."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_wheel_holds_all_packages_and_nothing_else(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "build", "--wheel", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for name in names:
        assert name.startswith(("twinpool/", "twinpool-")), name
    folders = ["router", "engine", "worker", "prefill_worker", "decode_worker", "kv_transfer", "kernels", "proto"]
    for folder in folders:
        expected = {
            f"twinpool/{folder}/{file.relative_to(ROOT / folder).as_posix()}" for file in (ROOT / folder).rglob("*.py")
        }
        assert expected <= names, sorted(expected - names)
    assert {"twinpool/py.typed", "twinpool/proto/inference.proto", "twinpool/cli/main.py"} <= names
