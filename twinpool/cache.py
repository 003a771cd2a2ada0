"""The folder for what can be made again: the demo model, compiled kernels, the tiles chosen for a GPU."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """TWINPOOL_CACHE, else XDG_CACHE_HOME/twinpool, else ~/.cache/twinpool; need not exist."""
    if given := os.environ.get("TWINPOOL_CACHE"):
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "twinpool"
