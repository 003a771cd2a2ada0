"""The cluster token that ``twinpool up`` drew, for the same user's commands on the same machine.

1. ``keep_token`` writes it to a file that only this user can read, named after a port of the deployment, with the id
of the process. 2. ``find_token`` reads it. 3. ``drop_token`` removes it when the deployment ends; ``drop_stale``, at
the next start, those of deployments that were killed.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from twinpool.cache import cache_folder


def keep_token(port: int, token: str) -> None:
    """Keeps the token of the deployment whose controller or admin service listens on ``port``.

    Raises:
        OSError: the cache cannot be written.
    """
    path = _path(port)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f"{token}\n{os.getpid()}\n")


def drop_token(port: int) -> None:
    """Removes what ``keep_token`` wrote. Idempotent."""
    _path(port).unlink(missing_ok=True)


def drop_stale() -> None:
    """Removes what deployments have left whose processes do not run any more.

    Raises:
        OSError: the cache cannot be written.
    """
    for path in (cache_folder() / "run").glob("port-*.token"):
        with contextlib.suppress(FileNotFoundError):  # another start is as busy
            pid = path.read_text().partition("\n")[2].strip()
            if pid.isdecimal() and not _runs(int(pid)):
                path.unlink()


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # the number is another user's by now
        return False
    return True


def find_token(port: int) -> str | None:
    """The token of this user's deployment whose controller or admin service listens on ``port``; None without one."""
    try:
        return _path(port).read_text().partition("\n")[0]
    except FileNotFoundError:
        return None


def _path(port: int) -> Path:
    return cache_folder() / "run" / f"port-{port}.token"
