"""A connector that goes wrong by a script, around one that works; for tests of everything above it.

Reads are numbered from 0 over all links, the warm-up's too. A script says what happens to each:

- REFUSE: ``read`` raises, nothing lands.
- FAIL: the first half lands, then the read is FAILED.
- DELAY: nothing happens for some polls, then it goes on.
- HANG: it stays PENDING, like a read from a stopped source. ``release`` is the source going on: then everything that
  hung lands at once, polled or not, cancelled or not, unless its link was closed. So whoever reuses a destination
  without ``close`` is found out.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from twinpool.kv_transfer.connectors.base import Connector, ConnectorError, Link, Read, ReadState, Send
from twinpool.kv_transfer.copy_table import CopyTable


class Fault(enum.Enum):
    """What happens to a read; see the module."""

    NONE = "none"
    REFUSE = "refuse"
    FAIL = "fail"
    DELAY = "delay"
    HANG = "hang"


Script = Callable[[int], Fault]
"""Read number → fault."""


def no_faults(number: int) -> Fault:
    """The script of a connector that works."""
    return Fault.NONE


def seeded(seed: int, weights: dict[Fault, float]) -> Script:
    """Draws each read's fault, independently, with the given relative weights; a function of (seed, number)."""
    faults, values = list(weights), list(weights.values())
    return lambda number: random.Random(f"{seed}:{number}").choices(faults, values)[0]


class FaultyConnector:
    """``inner`` with faults; everything but reads goes straight through. ``script`` may be replaced at any time."""

    def __init__(self, inner: Connector, script: Script = no_faults, delay_polls: int = 3) -> None:
        self._inner = inner
        self.script = script
        self._delay_polls = delay_polls
        self._number = 0
        self._links: list[FaultyLink] = []

    @property
    def name(self) -> str:
        """The inner connector's."""
        return self._inner.name

    @property
    def pumped(self) -> bool:
        """As the inner connector."""
        return self._inner.pumped

    def allocate(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """As the inner connector."""
        return self._inner.allocate(num_bytes, device)

    def metadata(self) -> bytes:
        """As the inner connector."""
        return self._inner.metadata()

    def connect(self, metadata: bytes, send: Send) -> FaultyLink:
        """Wraps the inner link."""
        link = FaultyLink(self._inner.connect(metadata, send), self._next_fault, self._delay_polls)
        self._links.append(link)
        return link

    def accept(self, peer: str, send: Send) -> None:
        """As the inner connector."""
        self._inner.accept(peer, send)

    def deliver(self, peer: str, payload: bytes) -> None:
        """As the inner connector."""
        self._inner.deliver(peer, payload)

    def dismiss(self, peer: str) -> None:
        """As the inner connector."""
        self._inner.dismiss(peer)

    def progress(self) -> None:
        """As the inner connector."""
        self._inner.progress()

    def close(self) -> None:
        """As the inner connector."""
        for link in self._links:
            link.close()
        self._inner.close()

    def release(self) -> None:
        """Lets everything land that hangs on a link that is still open."""
        for link in self._links:
            link.release()

    def _next_fault(self) -> Fault:
        fault = self.script(self._number)
        self._number += 1
        return fault


@dataclass(slots=True)
class FaultyRead:
    """``inner`` is None as long as nothing may land."""

    num_bytes: int
    table: CopyTable
    fault: Fault
    polls_left: int
    inner: Read | None = None


class FaultyLink:
    """See the module."""

    def __init__(self, inner: Link, next_fault: Callable[[], Fault], delay_polls: int) -> None:
        self._inner = inner
        self._next_fault = next_fault
        self._delay_polls = delay_polls
        self._hung: list[FaultyRead] = []
        self._closed = False

    @property
    def transport(self) -> str:
        """The inner link's."""
        return self._inner.transport

    def read(self, table: CopyTable) -> FaultyRead:
        """Starts, or refuses to."""
        fault = self._next_fault()
        if fault is Fault.REFUSE:
            raise ConnectorError("the script refuses this read")
        read = FaultyRead(table.num_bytes, table, fault, self._delay_polls)
        if fault is Fault.HANG:
            self._hung.append(read)
        elif fault is Fault.FAIL:
            read.inner = self._inner.read(_first_half(table))
        elif fault is Fault.NONE:
            read.inner = self._inner.read(table)
        return read

    def poll(self, read: Read) -> ReadState:
        """Progress, as far as the script lets it."""
        assert isinstance(read, FaultyRead)
        if self._closed:
            return ReadState.FAILED
        if read.fault is Fault.DELAY and read.inner is None:
            read.polls_left -= 1
            if read.polls_left > 0:
                return ReadState.PENDING
            read.inner = self._inner.read(read.table)
        if read.inner is None:
            return ReadState.PENDING
        state = self._inner.poll(read.inner)
        return ReadState.FAILED if read.fault is Fault.FAIL and state is ReadState.DONE else state

    def deliver(self, payload: bytes) -> None:
        """As the inner link."""
        self._inner.deliver(payload)

    def release(self) -> None:
        """Lands what hangs, unless the link is closed."""
        hung, self._hung = self._hung, []
        for read in hung if not self._closed else []:
            read.inner = self._inner.read(read.table)
            while self._inner.poll(read.inner) is ReadState.PENDING:
                pass

    def close(self) -> None:
        """Nothing of this link lands any more."""
        self._closed = True
        self._inner.close()


def _first_half(table: CopyTable) -> CopyTable:
    """Half of the bytes, at least one."""
    return table.slices(max(1, table.num_bytes // 2), len(table))[0]
