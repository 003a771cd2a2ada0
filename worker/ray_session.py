"""The end of all processes of a Ray node.

A node runs in a session of its own, and everything that Ray starts for it stays in that session, but the ranks leave it
(``rank_keeper``). Ray's agents do not end by themselves if both the raylet and the GCS were killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path


def kill_session(session: int) -> None:
    """Kills all processes of a session but the caller; returns when there are none. Linux only."""
    while found := _members(session):
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in found:
            with contextlib.suppress(ChildProcessError):  # others reap theirs
                os.waitpid(pid, 0)


def _members(session: int) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session and fields[0] not in "ZX":
                    found.append(int(folder.name))
    return found
