"""A request's body: read within bounds of size, time and shape, before anything parses it.

Parsing JSON holds the interpreter's lock whatever thread does it, so what bounds the event loop's delay is the number
of values. Numbers are cheap (prompts of token ids have many), objects and keys are not.
"""

from __future__ import annotations

import asyncio
import re

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from twinpool.errors import Cancelled, InvalidRequest

MAX_BODY_BYTES = 8 * 1024 * 1024
"""Two million tokens of text fit."""
READ_TIMEOUT_S = 30.0
MAX_OBJECTS = 10_000
MAX_LISTS = 10_000
MAX_KEYS = 20_000
MAX_VALUES = 1_000_000

_LIMITS = (
    (b"{", MAX_OBJECTS, "objects"),
    (b"[", MAX_LISTS, "lists"),
    (b":", MAX_KEYS, "keys"),
    (b",", MAX_VALUES, "values"),
)
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


async def read_body(request: Request) -> bytes:
    """The body, which is refused as soon as it is too large or too slow.

    Raises:
        HTTPException: 413 or 408.
        InvalidRequest: more values than any request needs.
        Cancelled: the client went away.
    """
    parts, size = [], 0
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            async for part in request.stream():
                size += len(part)
                if size > MAX_BODY_BYTES:
                    raise HTTPException(413, f"the body is larger than {MAX_BODY_BYTES >> 20} MiB; shorten the prompt")
                parts.append(part)
    except TimeoutError as error:
        raise HTTPException(408, f"the body did not arrive within {READ_TIMEOUT_S:g} s; send it at once") from error
    except ClientDisconnect as error:
        raise Cancelled("the client disconnected") from error
    body = b"".join(parts)
    check_shape(body)
    return body


def check_shape(body: bytes) -> None:
    """Refuses JSON with so many values that parsing it would hold up everybody.

    Raises:
        InvalidRequest: names what there is too much of.
    """
    if all(body.count(mark) <= most for mark, most, _ in _LIMITS):
        return
    bare = _STRING.sub(b"", body)  # those within strings do not count
    for mark, most, what in _LIMITS:
        if bare.count(mark) > most:
            raise InvalidRequest(f"the body holds more than {most} {what}; split the request")
