"""A pool keeps its size: over a scripted fleet, with failures, deaths and changes of mind."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import pytest

from twinpool.controller import pool as pool_module
from twinpool.controller.fleet import Replica, Role
from twinpool.controller.pool import Pool, Step
from twinpool.errors import Unavailable

LIMIT_S = 10


class ScriptedFleet:
    """Workers named by counting; ``fail`` of the next starts fail, and nothing ends while ``gate`` is closed."""

    def __init__(self) -> None:
        self.running: list[Replica] = []
        self.fail = 0
        self.started = 0
        self.ended: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self._change = asyncio.Event()

    def replicas(self, role: Role) -> Sequence[Replica]:
        return tuple(self.running)

    async def wait_changed(self) -> None:
        await self._change.wait()

    async def add(self, role: Role) -> Replica:
        self.started += 1
        replica = Replica(role, f"{role}-{self.started}", "a:1")
        await self.gate.wait()
        if self.fail:
            self.fail -= 1
            raise Unavailable("no room")
        self.running.append(replica)
        self.changed()
        return replica

    def retire(self, replica: Replica) -> None:
        self.running.remove(replica)
        self.changed()

    async def drain(self, replica: Replica) -> None:
        await self.gate.wait()
        self.ended.append(replica.worker_id)

    async def capacity(self, role: Role) -> int:
        return 9

    def die(self, index: int) -> None:
        self.retire(self.running[index])

    def changed(self) -> None:
        self._change.set()
        self._change = asyncio.Event()


@contextlib.asynccontextmanager
async def running(fleet: ScriptedFleet, target: int) -> AsyncIterator[Pool]:
    pool = Pool("decode", fleet, target)
    task = asyncio.create_task(pool.run())
    try:
        async with asyncio.timeout(LIMIT_S):
            while len(fleet.running) < target:
                await asyncio.sleep(0.001)
            yield pool
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def steps_of(pool: Pool, size: int) -> list[Step]:
    return [step async for step in pool.scale(size)]


async def test_newest_go_first_and_every_step_is_told() -> None:
    fleet = ScriptedFleet()
    async with running(fleet, 1) as pool:
        added = await steps_of(pool, 3)
        assert [(step.action, step.worker_id) for step in added] == [("added", "decode-2"), ("added", "decode-3")]
        assert added[-1].replicas == 3
        removed = await steps_of(pool, 1)
        assert {step.worker_id for step in removed} == {"decode-2", "decode-3"} == set(fleet.ended)
        assert [replica.worker_id for replica in fleet.running] == ["decode-1"]
        assert await steps_of(pool, 1) == []


async def test_a_replica_that_dies_is_replaced_over_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "FIRST_PAUSE_S", 0.001)
    fleet = ScriptedFleet()
    async with running(fleet, 2) as pool:
        fleet.fail = 3
        fleet.die(0)
        while len(fleet.running) < 2:
            await asyncio.sleep(0.001)
        assert [replica.worker_id for replica in fleet.running] == ["decode-2", "decode-6"]
        assert pool.target == 2


async def test_who_asks_is_told_of_a_failure_and_the_pool_stays_as_it_is() -> None:
    fleet = ScriptedFleet()
    async with running(fleet, 1) as pool:
        fleet.fail = 2
        steps = await steps_of(pool, 3)
        assert [(step.action, step.error) for step in steps] == [("failed", "no room")] * 2
        assert pool.target == 1
        assert fleet.started == 3


async def test_who_leaves_stops_nothing_and_who_comes_later_overrules() -> None:
    fleet = ScriptedFleet()
    async with running(fleet, 1) as pool:
        fleet.gate.clear()
        first = asyncio.create_task(steps_of(pool, 4))
        while fleet.started < 4:
            await asyncio.sleep(0.001)
        first.cancel()
        second = asyncio.create_task(steps_of(pool, 2))
        await asyncio.sleep(0.01)
        fleet.gate.set()
        steps = await second
        assert [step.action for step in steps].count("added") == 3
        assert len(fleet.running) == 2
        assert set(fleet.ended) == {"decode-3", "decode-4"}


async def test_a_death_while_a_pool_shrinks_ends_the_wait() -> None:
    fleet = ScriptedFleet()
    async with running(fleet, 2) as pool:
        fleet.die(1)
        await steps_of(pool, 1)
        assert len(fleet.running) == 1


async def test_the_end_of_a_controller_leaves_replicas_running() -> None:
    fleet = ScriptedFleet()
    async with running(fleet, 3):
        pass
    assert len(fleet.running) == 3
    assert fleet.ended == []
