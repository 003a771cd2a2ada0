"""Requests that go on while a test changes a deployment; each answer must be the one that an undisturbed one gave."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from load import check_same, prompt, stream

from twinpool import AsyncClient
from twinpool.results import Completion

PAUSE_S = 0.1
"""Between the requests of a stream: what starts beside them needs processors too."""
OPTIONS = {"temperature": 0.0, "ignore_eos": True}


@dataclass
class Load:
    """What ran in the background: by which workers, and how often a request was started again elsewhere."""

    finished: int = 0
    redispatches: int = 0
    prefill_workers: Counter[str] = field(default_factory=Counter)
    decode_workers: Counter[str] = field(default_factory=Counter)
    rounds: Counter[int] = field(default_factory=Counter)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, stream: int, answer: Completion) -> None:
        self.rounds[stream] += 1
        self.finished += 1
        self.redispatches += answer.usage.redispatches
        self.prefill_workers[answer.prefill_worker] += 1
        self.decode_workers[answer.decode_worker] += 1
        self.news.set()

    async def more(self, count: int) -> None:
        """Waits until so many more requests have finished."""
        wanted = self.finished + count
        while self.finished < wanted:
            self.news.clear()
            await self.news.wait()

    async def new_round(self) -> None:
        """Waits until every stream has finished a request that began after this call."""
        wanted = {stream: count + 2 for stream, count in self.rounds.items()}
        while any(self.rounds[stream] < count for stream, count in wanted.items()):
            self.news.clear()
            await self.news.wait()

    async def served_by(self, *decode_workers: str) -> None:
        """Waits until each of the decode workers has finished a request."""
        while not all(self.decode_workers[name] for name in decode_workers):
            self.news.clear()
            await self.news.wait()


@contextlib.asynccontextmanager
async def background_load(client: AsyncClient, lengths: Sequence[int] = (8, 20, 60, 250)) -> AsyncIterator[Load]:
    """Keeps a stream of each length (answer tokens) running for the time of the block; the first failure ends it."""
    load = Load()
    asks = [(prompt(number, 30 + 40 * number), length) for number, length in enumerate(lengths)]
    wanted = [await stream(client, ids, max_tokens=length, **OPTIONS) for ids, length in asks]
    stopping = False

    async def repeat(number: int) -> None:
        ids, length = asks[number]
        while not stopping:
            answer = await stream(client, ids, max_tokens=length, **OPTIONS)
            check_same(answer, wanted[number])
            load.add(number, answer)
            await asyncio.sleep(PAUSE_S)

    async def whole() -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(len(asks)):
                group.create_task(repeat(number))

    running = asyncio.create_task(whole())
    user = asyncio.current_task()
    assert user is not None
    running.add_done_callback(lambda task: user.cancel() if task.cancelled() or task.exception() else None)
    try:
        yield load
        stopping = True
        await running
    except asyncio.CancelledError:
        if running.done():
            running.result()
        raise
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
