"""Whether the engine's thread still turns, as health says it under the empty name (liveness).

An idle engine is woken for a sign of life, which costs a step without work. A step that takes longer than ``SILENCE_S``
counts as a hang: what asks health restarts the process then (Kubernetes' liveness probe), and routers have dropped it
by themselves long before if its sessions fell silent too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

log = logging.getLogger(__name__)

SILENCE_S = 60.0
_CHECKS = 6
"""Looks per ``SILENCE_S``."""


class Stepping(Protocol):
    """What is asked of the engine."""

    def load(self) -> object:
        """A snapshot, a new object after each step."""

    def post_many(self, commands: tuple[()]) -> None:
        """Wakes an idle engine."""


async def watch_engine(
    engine: Stepping, set_alive: Callable[[bool], Awaitable[None]], silence_s: float = SILENCE_S
) -> None:
    """Calls ``set_alive`` with False when no step has ended for ``silence_s``, and with True when one does again."""
    seen, silent = engine.load(), 0
    while True:
        engine.post_many(())
        await asyncio.sleep(silence_s / _CHECKS)
        newest = engine.load()
        if newest is not seen:
            if silent >= _CHECKS:
                log.warning("the engine goes on")
                await set_alive(True)
            seen, silent = newest, 0
            continue
        silent += 1
        if silent == _CHECKS:
            log.critical("the engine has not ended a step for %g s", silence_s)
            await set_alive(False)
