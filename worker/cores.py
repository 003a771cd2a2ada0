"""The processor cores that a worker's computing threads keep to (``engine.cores``).

Only threads that compute are pinned, by themselves: rank 0's engine thread, and the step thread of every other rank,
with the helpers that they start. Event loops and transfer threads go where there is room.
"""

from __future__ import annotations

import os

from twinpool.config import EngineSection
from twinpool.errors import ConfigError


def cores_for(section: EngineSection, local_rank: int, num_local: int) -> frozenset[int]:
    """The cores of one of ``num_local`` ranks on this machine; empty if it may compute anywhere.

    Each rank has cores of its own where ``engine.cores`` names enough for the threads of all, else they share them.

    Raises:
        ConfigError: this process may not use one of them.
    """
    missing = set(section.cores) - os.sched_getaffinity(0) if section.cores else set()
    if missing:
        allowed = ", ".join(map(str, sorted(os.sched_getaffinity(0))))
        raise ConfigError(f"engine.cores names {min(missing)}, but this process may use {allowed}; change engine.cores")
    each = max(section.threads, 1)
    if len(section.cores) < each * num_local:
        return frozenset(section.cores)
    return frozenset(section.cores[local_rank * each : (local_rank + 1) * each])


def pin_thread(cores: frozenset[int]) -> None:
    """Keeps the calling thread, and threads that it starts from now on, to ``cores``; empty changes nothing."""
    if cores:
        os.sched_setaffinity(0, cores)
