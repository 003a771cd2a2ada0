"""The workers of ``twinpool up``: children of this process, on this machine.

A replica is a child of the supervisor, which restarts it in place when it dies; only ``retire`` takes it off the list.
Names count from 0 per pool; a new worker takes the lowest free number.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from twinpool.child import ChildSpec
from twinpool.config import Config, PoolSection
from twinpool.controller.fleet import ROLES, Replica, Role
from twinpool.supervisor import Supervisor

MakeSpec = Callable[[Role, int], ChildSpec]
"""Picks free ports for worker ``number`` of a pool; raises ConfigError when a configured port is taken."""


class LocalFleet:
    """A ``Fleet``; see there and the module docstring. Starts with the children that the supervisor was given."""

    def __init__(self, config: Config, supervisor: Supervisor, make_spec: MakeSpec) -> None:
        self._config = config
        self._supervisor = supervisor
        self._make_spec = make_spec
        self._replicas: dict[Role, list[Replica]] = {role: [] for role in ROLES}
        self._taken: dict[Role, set[int]] = {role: set() for role in ROLES}
        self._change = asyncio.Event()

    def started(self, role: Role, number: int, spec: ChildSpec) -> None:
        """Takes up a child that the supervisor was made with."""
        self._taken[role].add(number)
        self._replicas[role].append(Replica(role, spec.name, spec.address))

    def replicas(self, role: Role) -> Sequence[Replica]:
        """See ``Fleet``."""
        return tuple(self._replicas[role])

    async def wait_changed(self) -> None:
        """See ``Fleet``."""
        await self._change.wait()

    async def add(self, role: Role) -> Replica:
        """See ``Fleet``."""
        number = next(number for number in range(len(self._taken[role]) + 1) if number not in self._taken[role])
        self._taken[role].add(number)
        try:
            spec = self._make_spec(role, number)
            await self._supervisor.add(spec)
        except BaseException:
            self._taken[role].discard(number)
            raise
        replica = Replica(role, spec.name, spec.address)
        self._replicas[role].append(replica)
        self._changed()
        return replica

    def retire(self, replica: Replica) -> None:
        """See ``Fleet``."""
        self._replicas[replica.role].remove(replica)
        self._changed()

    async def drain(self, replica: Replica) -> None:
        """See ``Fleet``."""
        await self._supervisor.remove(replica.worker_id)
        self._taken[replica.role].discard(int(replica.worker_id.rpartition("-")[2]))

    async def capacity(self, role: Role) -> int:
        """See ``Fleet``; counts a GPU, or else a processor, for each rank."""
        pools: Mapping[Role, PoolSection] = {"prefill": self._config.prefill, "decode": self._config.decode}
        taken = sum(len(self._replicas[other]) * _ranks(pools[other]) for other in ROLES if other != role)
        fits = (device_count(self._config.model.device) - taken) // _ranks(pools[role])
        return max(fits, len(self._replicas[role]))

    def _changed(self) -> None:
        self._change.set()
        self._change = asyncio.Event()


def _ranks(pool: PoolSection) -> int:
    return pool.tp_size * pool.pp_size


def device_count(device: str) -> int:
    """The GPUs of this machine that may be used, or its processors if there are none or ``device`` is cpu."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        gpus = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    else:
        gpus = len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return gpus if gpus and device != "cpu" else len(os.sched_getaffinity(0))
