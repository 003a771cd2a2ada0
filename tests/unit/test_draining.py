"""When a draining worker takes attempts, refuses them, and hands over what runs."""

from __future__ import annotations

import asyncio

import pytest

from twinpool.errors import Unavailable
from twinpool.worker.draining import Draining


class Clock(asyncio.SelectorEventLoop):
    """Says what time it is by hand; timers are called by hand too."""

    now = 0.0

    def time(self) -> float:
        return self.now


def test_what_was_sent_before_routers_knew_is_taken() -> None:
    clock = Clock()
    draining = Draining(clock, "decode-0", 0.25, lambda: None)
    clock.now = 10.0
    draining.order(True, None)
    assert (draining.active, draining.refuses) == (True, False)
    clock.now = 10.4
    draining.order(True, None)  # again: the first one counts
    clock.now = 10.5
    assert draining.refuses
    draining.order(False, None)
    assert (draining.active, draining.refuses) == (False, False)
    clock.close()


async def test_hand_over_comes_after_its_time_unless_it_is_taken_back() -> None:
    handed = asyncio.Event()
    draining = Draining(asyncio.get_running_loop(), "decode-0", 0.0, handed.set)
    draining.order(True, 0.01)
    draining.order(False, None)
    await asyncio.sleep(0.05)
    assert not handed.is_set()
    draining.order(True, 0.01)
    async with asyncio.timeout(10):
        await handed.wait()


async def test_the_end_of_the_process_cannot_be_taken_back() -> None:
    draining = Draining(asyncio.get_running_loop(), "decode-0", 0.0, lambda: None)
    draining.end()
    draining.order(True, None)
    with pytest.raises(Unavailable, match="decode-0 is shutting down"):
        draining.order(False, None)
    assert draining.refuses
