"""The child's side of ``supervisor``: ends this process when the one that started it is gone, however it went.

The parent holds the writing end of a pipe and never writes. When the kernel closes it, a thread that blocks on the
reading end wakes, asks this process to drain, and ends it for good if it does not. A parent that may die for reasons
which are not this process's (``controller.ray_replica``) sets a grace in which it serves on.
"""

from __future__ import annotations

import os
import signal
import threading

PARENT_FD = "TWINPOOL_PARENT_FD"
PARENT_GRACE_S = "TWINPOOL_PARENT_GRACE_S"
GRACE_S = 10.0


def follow_parent() -> None:
    """Starts the watch if a supervisor started this process; else does nothing."""
    if descriptor := os.environ.pop(PARENT_FD, None):
        grace_s = float(os.environ.pop(PARENT_GRACE_S, "0"))
        threading.Thread(target=_watch, args=(int(descriptor), grace_s), name="parent-watch", daemon=True).start()


def _watch(descriptor: int, grace_s: float) -> None:
    while os.read(descriptor, 1):
        pass
    threading.Event().wait(grace_s)
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(GRACE_S)
    os._exit(1)
