"""What sessions learn of a worker's prefix cache."""

from __future__ import annotations

import asyncio

from twinpool.block_hash import short_name
from twinpool.proto import worker_pb2
from twinpool.rpc import Outbox
from twinpool.worker.cache_feed import NAMES_PER_MESSAGE, CacheFeed

SessionOutbox = Outbox[worker_pb2.SessionResponse]


def hashes(*numbers: int) -> list[bytes]:
    return [number.to_bytes(16, "little") for number in numbers]


class Reader:
    """A router at the other end: applies what comes."""

    def __init__(self, outbox: SessionOutbox) -> None:
        self.known: set[int] = set()
        self.messages: list[worker_pb2.CacheEvents] = []
        self._outbox = outbox

    async def read(self, count: int) -> None:
        async with asyncio.timeout(5):
            async for message in self._outbox:
                events = message.cache
                self.messages.append(events)
                self.known = set() if events.reset else self.known
                self.known -= set(events.removed)
                self.known |= set(events.stored)
                if len(self.messages) >= count:
                    return


async def test_a_session_learns_what_was_cached_before_it_and_then_the_changes() -> None:
    feed = CacheFeed(asyncio.get_running_loop(), 0.001)
    feed.apply(False, hashes(1, 2, 3), [])
    feed.apply(False, [], hashes(2))
    outbox: SessionOutbox = Outbox()
    feed.open(1, outbox)
    reader = Reader(outbox)
    await reader.read(1)
    assert reader.messages[0].reset
    assert reader.known == {1, 3}
    feed.apply(False, hashes(4, 5), hashes(1))
    await reader.read(2)
    assert reader.known == {3, 4, 5}
    feed.apply(True, hashes(9), [])
    await reader.read(3)
    assert reader.known == {9}
    feed.close(1)
    feed.apply(False, hashes(10), [])  # nobody is told, and nothing fails


async def test_changes_that_nobody_was_told_cancel_out() -> None:
    feed = CacheFeed(asyncio.get_running_loop(), 0.001)
    outbox: SessionOutbox = Outbox()
    feed.open(1, outbox)
    reader = Reader(outbox)
    await reader.read(1)
    for number in range(100, 200):
        feed.apply(False, hashes(number), [])
        feed.apply(False, [], hashes(number))
    feed.apply(False, hashes(1), [])
    await reader.read(2)
    assert reader.known == {1}
    assert not reader.messages[1].removed


async def test_messages_are_bounded_and_wait_for_a_slow_session() -> None:
    feed = CacheFeed(asyncio.get_running_loop(), 0.001)
    outbox: SessionOutbox = Outbox()
    feed.open(1, outbox)
    outbox.put(worker_pb2.SessionResponse())  # unsent data
    feed.apply(False, hashes(*range(10_000)), [])
    await asyncio.sleep(0.02)
    assert outbox.last_data is not None
    assert outbox.last_data.WhichOneof("message") is None
    async for _ in outbox:
        break
    reader = Reader(outbox)
    await reader.read(3)
    assert len(reader.known) == 10_000
    assert all(len(m.stored) + len(m.removed) <= NAMES_PER_MESSAGE for m in reader.messages)
    assert all(m.ByteSize() < 64 << 10 for m in reader.messages)


def test_short_names_are_the_first_eight_bytes() -> None:
    assert short_name(bytes(range(16))) == int.from_bytes(bytes(range(8)), "little")
