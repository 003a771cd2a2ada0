"""Tokens that ``twinpool up`` leaves for operators' commands, and those that a killed one has left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from twinpool.run_token import drop_stale, drop_token, find_token, keep_token


def test_tokens_of_killed_deployments_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINPOOL_CACHE", str(tmp_path))
    killed = "from twinpool.run_token import keep_token; keep_token(1, 'old'); import os; os._exit(1)"
    subprocess.run([sys.executable, "-P", "-c", killed], check=False)
    keep_token(2, "new")
    (tmp_path / "run" / "port-3.token").write_text("of a version that kept no process id")
    assert [find_token(port) for port in (1, 2)] == ["old", "new"]
    drop_stale()
    assert [find_token(port) for port in (1, 2)] == [None, "new"]
    assert find_token(3)
    assert (tmp_path / "run" / "port-2.token").stat().st_mode & 0o077 == 0
    assert os.getpid() == int((tmp_path / "run" / "port-2.token").read_text().splitlines()[1])
    drop_token(2)
    drop_token(2)
    assert find_token(2) is None
