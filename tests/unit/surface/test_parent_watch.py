"""What a process does when the one that started it is gone, and perhaps the one that ran that."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from twinpool.parent_watch import PARENT_FD, PARENT_GRACE_S, PARENT_RUNNER

PROGRAM = """
import signal, threading
from twinpool.parent_watch import follow_parent
ended = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: ended.set())
follow_parent()
print("ready", flush=True)
while not ended.wait(0.05):
    pass
"""
GRACE_S = 1.5


def seconds_after_the_parent(runner: subprocess.Popen[bytes] | None, runner_ends: bool) -> float:
    """How long a child goes on when its parent's end of the pipe closes."""
    ours, theirs = os.pipe()
    environment = {**os.environ, PARENT_FD: str(ours)}
    if runner is not None:
        environment |= {PARENT_RUNNER: str(runner.pid), PARENT_GRACE_S: str(GRACE_S)}
    argv = [sys.executable, "-P", "-c", PROGRAM]
    with subprocess.Popen(argv, pass_fds=[ours], env=environment, stdout=subprocess.PIPE) as child:
        os.close(ours)
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        if runner is not None and runner_ends:
            runner.kill()
        began = time.monotonic()
        os.close(theirs)
        assert child.wait(30) == 0
        return time.monotonic() - began


def test_it_drains_at_once() -> None:
    seconds_after_the_parent(None, False)


@pytest.mark.parametrize("runner_ends", [True, False])
def test_it_serves_on_only_without_its_parents_runner(runner_ends: bool) -> None:
    with subprocess.Popen(["sleep", "600"]) as runner:
        try:
            went_on_s = seconds_after_the_parent(runner, runner_ends)
        finally:
            runner.kill()
    if runner_ends:
        assert went_on_s >= GRACE_S
