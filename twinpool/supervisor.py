"""Keeps the processes of a local deployment alive.

1. ``start`` starts all children. 2. A child that ends is reported and started again with a growing delay, unless it
was never ready: then the deployment cannot work, and ``failure`` carries its own words. 3. ``add`` and ``remove``
change the set while it runs. 4. ``stop`` asks the children to drain and kills what is left of them after the grace.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from twinpool.child import Child, ChildSpec

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0
# A child that was ready this long starts over with the first delay.
HEALTHY_S = 60.0
_KILL_S = 5.0


class Supervisor:
    """Runs children; belongs to one event loop.

    Args:
        specs: the children, in the order in which they are drained.
        log: takes (child's name, line) for every line a child prints.
        report: takes a line about a child that ended or came back.
    """

    def __init__(
        self, specs: Sequence[ChildSpec], log: Callable[[str, str], None], report: Callable[[str], None]
    ) -> None:
        self._log = log
        self._report = report
        self._children = {spec.name: Child(spec, log, report) for spec in specs}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self) -> None:
        """Starts all children; returns at once."""
        for child in self._children.values():
            self._keep(child)

    async def ready(self) -> None:
        """Waits until every child was ready once.

        Raises:
            ChildFailed: a child ended before.
        """
        await self._until(asyncio.gather(*(child.ready.wait() for child in self._children.values())))

    async def failure(self) -> None:
        """Waits for ever.

        Raises:
            ChildFailed: a child ended that was never ready.
        """
        await self._until(asyncio.get_running_loop().create_future())

    async def add(self, spec: ChildSpec) -> None:
        """Starts one more child and waits until it is ready.

        Raises:
            ChildFailed: it ended before; nothing is left of it, and the other children go on.
        """
        child = self._children[spec.name] = Child(spec, self._log, self._report)
        task = asyncio.create_task(self._live_on(child), name=spec.name)
        ready = asyncio.create_task(child.ready.wait())
        try:
            await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
        except BaseException:
            self._tasks[spec.name] = task
            await asyncio.shield(self._end(spec.name, 0))
            raise
        finally:
            ready.cancel()
        self._tasks[spec.name] = task

    async def remove(self, name: str) -> None:
        """Asks a child to drain and waits for its end; kills what is left after its grace."""
        await self._end(name, self._children[name].spec.drain_s)

    async def _end(self, name: str, drain_s: float) -> None:
        child, task = self._children.pop(name), self._tasks.pop(name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        try:
            if drain_s:
                child.terminate()
                await child.ended_within(drain_s)
        finally:
            child.kill()
            await asyncio.shield(child.ended_within(_KILL_S))

    def _keep(self, child: Child) -> None:
        self._tasks[child.spec.name] = asyncio.create_task(self._live_on(child), name=child.spec.name)

    async def _live_on(self, child: Child) -> None:
        """Runs a child for ever, over and over; raises ChildFailed when it ends without ever being ready."""
        delay_s = FIRST_DELAY_S
        while True:
            started = time.monotonic()
            code = await child.live()
            if not child.ready.is_set():
                raise child.failure(code)
            delay_s = FIRST_DELAY_S if time.monotonic() - started > HEALTHY_S else min(MAX_DELAY_S, delay_s * 2)
            self._report(f"{child.cause(code)}; starting it again in {delay_s:.1f} s")
            await asyncio.sleep(delay_s)

    async def _until(self, goal: asyncio.Future[Any]) -> None:
        try:
            while not goal.done():
                await asyncio.wait([goal, *self._tasks.values()], return_when=asyncio.FIRST_COMPLETED)
                for task in list(self._tasks.values()):
                    if task.done():
                        task.result()
        finally:
            goal.cancel()
            await asyncio.gather(goal, return_exceptions=True)

    async def stop(self) -> None:
        """Drains the children in order, then kills what is left. Cancelling it goes to the kill at once."""
        tasks, self._tasks = list(self._tasks.values()), {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        children = list(self._children.values())
        try:
            for child in children:
                child.terminate()
                if child is children[0]:  # the router first: it ends its streams while workers still serve
                    await child.ended_within(child.spec.drain_s)
            async with asyncio.TaskGroup() as group:
                for child in children:
                    group.create_task(child.ended_within(child.spec.drain_s))
        finally:
            for child in children:
                child.kill()
            await asyncio.shield(asyncio.gather(*(child.ended_within(_KILL_S) for child in children)))
