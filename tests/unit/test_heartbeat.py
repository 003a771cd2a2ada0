"""Health under the empty name follows the engine's steps."""

from __future__ import annotations

import asyncio

from twinpool.worker.heartbeat import watch_engine


class Engine:
    """Takes a step when it is woken, unless it hangs."""

    def __init__(self) -> None:
        self.hangs = False
        self._load = object()

    def load(self) -> object:
        return self._load

    def post_many(self, commands: tuple[()]) -> None:
        if not self.hangs:
            self._load = object()


async def test_a_hanging_engine_is_not_alive_until_it_goes_on() -> None:
    engine = Engine()
    said: asyncio.Queue[bool] = asyncio.Queue()
    watching = asyncio.create_task(watch_engine(engine, said.put, silence_s=0.06))
    await asyncio.sleep(0.2)
    assert said.empty(), "an idle engine is alive"
    engine.hangs = True
    assert await asyncio.wait_for(said.get(), 10) is False
    await asyncio.sleep(0.2)
    assert said.empty(), "said once"
    engine.hangs = False
    assert await asyncio.wait_for(said.get(), 10) is True
    watching.cancel()
