"""The cluster token that ``twinpool up`` drew, for the same user's commands on the same machine.

1. ``keep_token`` writes it to a file that only this user can read, named after a port of the deployment.
2. ``find_token`` reads it. 3. ``drop_token`` removes it when the deployment ends; the next overwrites one that a
killed one left.
"""

from __future__ import annotations

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
        file.write(token)


def drop_token(port: int) -> None:
    """Removes what ``keep_token`` wrote. Idempotent."""
    _path(port).unlink(missing_ok=True)


def find_token(port: int) -> str | None:
    """The token of this user's deployment whose controller or admin service listens on ``port``; None without one."""
    try:
        return _path(port).read_text()
    except FileNotFoundError:
        return None


def _path(port: int) -> Path:
    return cache_folder() / "run" / f"port-{port}.token"
