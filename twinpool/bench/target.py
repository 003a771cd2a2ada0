"""What a load test asks: a router over gRPC, or what ``openai_target`` speaks to; and the two kinds of load.

``ask`` sends one greedy request and notes when each piece of the answer came. A failure is part of the result.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from twinpool import AsyncClient
from twinpool.bench.workload import Ask
from twinpool.errors import TwinpoolError


@dataclass(slots=True)
class Timeline:
    """One request: when it was sent, when pieces came (``perf_counter`` seconds), and how many tokens it got."""

    prompt_tokens: int
    sent: float
    pieces: list[float] = field(default_factory=list)
    ended: float = 0.0
    tokens: int = 0
    error: str = ""


class Target(Protocol):
    """A server under load."""

    async def ask(self, ask: Ask) -> Timeline:
        """Sends one request and reads it to its end; never raises for a request that fails."""

    async def close(self) -> None:
        """Closes connections."""


class GrpcTarget:
    """A twinpool router."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def ask(self, ask: Ask) -> Timeline:
        """See ``Target``."""
        timeline = Timeline(len(ask.prompt), time.perf_counter())
        options: dict[str, Any] = {"temperature": 0.0, "max_tokens": ask.output_tokens, "ignore_eos": True}
        try:
            async with self._client.stream(ask.prompt, **options) as stream:
                async for chunk in stream:
                    if chunk.token_ids:
                        timeline.pieces.append(time.perf_counter())
                        timeline.tokens += len(chunk.token_ids)
            timeline.prompt_tokens = stream.result.usage.prompt_tokens
        except TwinpoolError as error:
            timeline.error = f"{error.kind}: {error.message}"
        timeline.ended = time.perf_counter()
        return timeline

    async def close(self) -> None:
        """See ``Target``."""
        await self._client.close()


async def run_closed(target: Target, asks: list[Ask], concurrency: int) -> list[Timeline]:
    """Keeps ``concurrency`` requests under way: the next starts when one has ended."""
    queue = list(reversed(asks))
    done: list[Timeline] = []

    async def worker() -> None:
        while queue:
            done.append(await target.ask(queue.pop()))

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return done


async def run_open(target: Target, asks: list[Ask], offsets: list[float], most: int | None) -> list[Timeline]:
    """Starts each request at its time whatever the others do; ``most``, if given, are under way at once.

    A request that waits for its turn was sent when it should have been: waiting is part of its time to first token.
    """
    began = time.perf_counter()
    gate: contextlib.AbstractAsyncContextManager[Any] = asyncio.Semaphore(most) if most else contextlib.nullcontext()

    async def one(ask: Ask, offset: float) -> Timeline:
        await asyncio.sleep(max(0.0, began + offset - time.perf_counter()))
        due = time.perf_counter()
        async with gate:
            timeline = await target.ask(ask)
        timeline.sent = due
        return timeline

    return list(await asyncio.gather(*(one(ask, offset) for ask, offset in zip(asks, offsets, strict=True))))
