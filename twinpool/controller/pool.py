"""Keeps one pool at its size.

``run`` compares the target with the replicas that there are after every change: it adds what is missing and drains what
is too many, newest first, all at once. A worker that cannot be started is tried again after a growing pause; while
somebody waits in ``scale``, the pool instead stays at the size that it has, and the caller is told why. Cancelling
``run`` stops what is being started and leaves every replica running.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Literal

from twinpool.controller.fleet import Fleet, Replica, Role
from twinpool.errors import TwinpoolError

log = logging.getLogger(__name__)

FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 30.0


@dataclass(frozen=True, slots=True)
class Step:
    """Something that ended: ``seconds`` is what it took, ``replicas`` how many the pool has now."""

    action: Literal["added", "removed", "failed"]
    worker_id: str
    seconds: float
    replicas: int
    error: str = ""


class Pool:
    """See the module docstring; belongs to one event loop."""

    def __init__(self, role: Role, fleet: Fleet, target: int) -> None:
        self.role: Role = role
        self.target = target
        self._fleet = fleet
        self._adding = 0
        self._busy = 0
        self._pause_s = FIRST_PAUSE_S
        self._waiting: set[asyncio.Queue[Step | None]] = set()
        self._wake = asyncio.Event()
        self._retargeted = asyncio.Event()

    async def wait_retargeted(self) -> None:
        """Returns after the next change of the target."""
        await self._retargeted.wait()

    async def run(self) -> None:
        """Keeps the size until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_fleet())
            while True:
                self._wake.clear()
                self._compare(group)
                await self._wake.wait()

    async def scale(self, replicas: int) -> AsyncIterator[Step]:
        """Sets the target and yields each step until the pool has reached it. Leaving early stops nothing."""
        news: asyncio.Queue[Step | None] = asyncio.Queue()
        self._waiting.add(news)
        self._aim(replicas)
        self._wake.set()
        try:
            while not (self._settled and news.empty()):
                if (step := await news.get()) is not None:
                    yield step
        finally:
            self._waiting.discard(news)

    def _aim(self, target: int) -> None:
        self.target = target
        self._retargeted.set()
        self._retargeted = asyncio.Event()

    @property
    def _settled(self) -> bool:
        return not self._busy and len(self._fleet.replicas(self.role)) == self.target

    async def _follow_fleet(self) -> None:
        while True:
            await self._fleet.wait_changed()
            self._wake.set()

    def _compare(self, group: asyncio.TaskGroup) -> None:
        replicas = self._fleet.replicas(self.role)
        for _ in range(self.target - len(replicas) - self._adding):
            self._adding += 1
            self._start(group, self._add())
        for replica in reversed(replicas[self.target :]):
            self._fleet.retire(replica)
            self._start(group, self._drain(replica))
        if self._settled:
            self._tell(None)

    def _start(self, group: asyncio.TaskGroup, work: Coroutine[None, None, Step]) -> None:
        async def do() -> None:
            step = await work
            self._busy -= 1
            self._tell(step)
            self._wake.set()

        self._busy += 1
        group.create_task(do())

    async def _add(self) -> Step:
        started = time.monotonic()
        try:
            replica = await self._fleet.add(self.role)
        except TwinpoolError as error:
            log.error("a %s worker could not be started: %s", self.role, error.message)
            seconds = time.monotonic() - started
            if self._waiting:
                self._aim(min(self.target, len(self._fleet.replicas(self.role)) + self._adding - 1))
            else:
                await asyncio.sleep(self._pause_s)
                self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
            self._adding -= 1
            return Step("failed", "", seconds, len(self._fleet.replicas(self.role)), error.message)
        self._pause_s = FIRST_PAUSE_S
        self._adding -= 1
        return self._step("added", replica, started)

    async def _drain(self, replica: Replica) -> Step:
        started = time.monotonic()
        await self._fleet.drain(replica)
        return self._step("removed", replica, started)

    def _step(self, action: Literal["added", "removed"], replica: Replica, started: float) -> Step:
        seconds = time.monotonic() - started
        log.info("%s %s after %.2f s", action, replica.worker_id, seconds)
        return Step(action, replica.worker_id, seconds, len(self._fleet.replicas(self.role)))

    def _tell(self, step: Step | None) -> None:
        for news in self._waiting:
            news.put_nowait(step)
