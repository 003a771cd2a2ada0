"""The child's side of ``supervisor``: ends this process when the one that started it is gone, however it went.

The parent holds the writing end of a pipe and never writes. When the kernel closes it, a thread that blocks on the
reading end wakes, asks this process to drain, and ends it for good if it does not.

A parent that belongs to something this process does not need (an actor of Ray, see ``controller.ray_replica``) names
the process that runs it and a grace: if that one has ended too, the process serves on for the grace before it drains.
"""

from __future__ import annotations

import os
import select
import signal
import threading

PARENT_FD = "TWINPOOL_PARENT_FD"
PARENT_GRACE_S = "TWINPOOL_PARENT_GRACE_S"
PARENT_RUNNER = "TWINPOOL_PARENT_RUNNER"
GRACE_S = 10.0
RUNNER_END_S = 5.0
"""A runner that dies has ended so long after the parent at the latest."""


def follow_parent() -> None:
    """Starts the watch if a supervisor started this process; else does nothing."""
    if descriptor := os.environ.pop(PARENT_FD, None):
        grace_s = float(os.environ.pop(PARENT_GRACE_S, "0"))
        runner = os.environ.pop(PARENT_RUNNER, "")
        ended = os.pidfd_open(int(runner)) if runner else None
        arguments = (int(descriptor), ended, grace_s)
        threading.Thread(target=_watch, args=arguments, name="parent-watch", daemon=True).start()


def _watch(descriptor: int, runner: int | None, grace_s: float) -> None:
    while os.read(descriptor, 1):
        pass
    if runner is not None and select.select([runner], [], [], RUNNER_END_S)[0]:
        threading.Event().wait(grace_s)
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(GRACE_S)
    os._exit(1)
