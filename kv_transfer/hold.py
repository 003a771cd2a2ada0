"""One hold on the prefill side: KV promised to a decode worker. ``holds`` tells its life cycle."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Protocol

from twinpool.kv_transfer.messages import Final, Segment


class ReadyEvent(Protocol):
    """Proves that a kernel has written: ``query()`` is cheap and true once it has."""

    def query(self) -> bool:
        """Whether everything before the event has been written."""


@dataclass(frozen=True, slots=True)
class HoldLimits:
    """Bounds, in seconds."""

    open_timeout_s: float = 10.0
    hold_timeout_s: float = 120.0
    unknown_open_s: float = 2.0
    expect_timeout_s: float = 600.0
    tombstone_s: float = 120.0


class HoldState(enum.Enum):
    """OPENED: only the peer's Open is known. EXPECTED: the Submit arrived. FINISHED: only Final is left to deliver."""

    OPENED = "opened"
    EXPECTED = "expected"
    HELD = "held"
    FINISHED = "finished"
    RELEASED = "released"
    REVOKED = "revoked"


@dataclass(frozen=True, slots=True)
class HoldStats:
    """What the table holds now, and what it has done since start."""

    open: int
    held_blocks: int
    released: int
    revoked: int


@dataclass(slots=True)
class Hold:
    """One promise. ``unproven`` segments wait for their events, ``unsent`` ones for a peer."""

    transfer_id: int
    state: HoldState
    deadline: float
    peer: str | None = None
    num_blocks: int = 0
    unproven: list[tuple[Segment, ReadyEvent]] = field(default_factory=list)
    unsent: list[Segment] = field(default_factory=list)
    final: Final | None = None
    final_sent: bool = False
    reading: bool = False
    """Whether segments were sent of which the peer has not said that they are read."""
    read: bool = False
    """Whether the peer has said ``Done``."""
