"""Server-sent events with a watch on the client.

The response starts with the first event, so that a request which fails before has a proper status. When the client
goes away, the source is closed at once.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from twinpool.errors import Cancelled, TwinpoolError

T = TypeVar("T")


class EventStream(Response):
    """Sends what ``source`` yields as events, then ``[DONE]``; an error becomes the last event, without ``[DONE]``."""

    media_type = "text/event-stream"

    def __init__(
        self, first: Any, source: AsyncGenerator[Any, None], error_body: Callable[[TwinpoolError], Any]
    ) -> None:
        super().__init__()
        self._first = first
        self._source = source
        self._error_body = error_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application."""
        try:
            await _first_of(self._send_all(send), _disconnected(receive))
        finally:
            await self._source.aclose()

    async def _send_all(self, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await _send_event(send, self._first)
        try:
            async for event in self._source:
                await _send_event(send, event)
        except TwinpoolError as error:
            await _send_event(send, self._error_body(error))
        else:
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """Awaits ``work`` and cancels it when the client goes away. The body must have been read.

    Raises:
        Cancelled: the client went away first.
    """
    result = await _first_of(work, _disconnected(request.receive))
    if result is _GONE:
        raise Cancelled("the client disconnected")
    return result  # type: ignore[return-value]


_GONE = object()


async def _disconnected(receive: Receive) -> object:
    while (await receive())["type"] != "http.disconnect":
        pass
    return _GONE


async def _first_of(work: Awaitable[T], watch: Awaitable[object]) -> T | object:
    tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(work), asyncio.ensure_future(watch)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finished: T | object = (tasks[0] if tasks[0] in done else tasks[1]).result()
        return finished
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _send_event(send: Send, event: Any) -> None:
    body = b"data: " + json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
    await send({"type": "http.response.body", "body": body, "more_body": True})
