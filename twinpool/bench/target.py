"""What a load test asks: a router over gRPC, any OpenAI-compatible server, or a vLLM pair of prefill and decode.

``ask`` sends one greedy request and notes when each piece of the answer came. A failure is part of the result.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp

from twinpool import AsyncClient
from twinpool.bench.workload import Ask
from twinpool.errors import TwinpoolError

TIMEOUT_S = 600.0


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


class OpenAITarget:
    """``/v1/completions`` of any server; with ``prefill_url`` a vLLM pair.

    Then each prompt goes to the prefill server first, for one token, and what it answers about the KV goes with the
    request to the decode server: both legs count.
    """

    def __init__(self, url: str, model: str, api_key: str | None = None, prefill_url: str | None = None) -> None:
        self._url = f"{url.rstrip('/')}/v1/completions"
        self._prefill_url = None if prefill_url is None else f"{prefill_url.rstrip('/')}/v1/completions"
        self._model = model
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._session = aiohttp.ClientSession(
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
            connector=aiohttp.TCPConnector(limit=0),
        )

    async def ask(self, ask: Ask) -> Timeline:
        """See ``Target``."""
        body = {
            "model": self._model,
            "prompt": ask.prompt,
            "temperature": 0,
            "max_tokens": ask.output_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        timeline = Timeline(len(ask.prompt), time.perf_counter())
        try:
            if self._prefill_url is not None:
                body["kv_transfer_params"] = await self._prefill(self._prefill_url, body)
            await self._stream(body, timeline)
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
            timeline.error = f"{type(error).__name__}: {error}"
        timeline.ended = time.perf_counter()
        return timeline

    async def close(self) -> None:
        """See ``Target``."""
        await self._session.close()

    async def _prefill(self, url: str, body: dict[str, Any]) -> Any:
        """The first leg of vLLM's disaggregated prefill."""
        wish = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
        leg = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": wish}
        del leg["stream_options"]
        async with self._session.post(url, json=leg) as response:
            return (await _checked(response).json())["kv_transfer_params"]

    async def _stream(self, body: dict[str, Any], timeline: Timeline) -> None:
        async with self._session.post(self._url, json=body) as response:
            if response.status != 200:
                timeline.error = f"HTTP {response.status}: {(await response.text())[:200]}"
                return
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    timeline.error = str(event["error"])[:200]
                if event.get("choices"):
                    timeline.pieces.append(time.perf_counter())
                usage = event.get("usage")
                if usage:
                    timeline.tokens, timeline.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]


def _checked(response: aiohttp.ClientResponse) -> aiohttp.ClientResponse:
    response.raise_for_status()
    return response


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
