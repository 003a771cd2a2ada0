"""The connector interface.

Life cycle:

1. Each rank makes one ``Connector`` and lets it ``allocate`` the KV region (the connector owns that memory). Whoever
   uses the links of a rank sees its ``Endpoint``, which may be in another process.
2. The source publishes ``metadata()``; it travels to readers over the authenticated ``kv.v1`` session only.
3. A reader calls ``connect(metadata)`` per peer and gets a ``Link``: one agent per peer.
4. ``Link.read`` starts a read, ``Link.poll`` observes it. A read that was started may land until it is DONE or FAILED,
   or until ``Link.close`` has returned: closing destroys the agent and is the only fence against a hung peer.
5. While somebody may be reading from it, the source calls ``progress()``.
6. ``close()`` ends everything and frees the region.

All methods are called on the transfer thread of the worker, except ``allocate`` and ``metadata`` (start-up).
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Protocol

import torch

from twinpool.kv_transfer.copy_table import CopyTable


class ReadState(enum.Enum):
    """State of a read. After DONE and FAILED nothing of it can land any more."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


class ConnectorError(Exception):
    """A connector could not do what was asked; says cause and remedy."""


class Read(Protocol):
    """A started read, opaque; ``num_bytes`` is what it moves."""

    @property
    def num_bytes(self) -> int:
        """Bytes that the read moves."""


class Link(Protocol):
    """A reader's connection to one source rank."""

    @property
    def transport(self) -> str:
        """Connector and transport in use, for example "nixl/shm"."""

    def read(self, table: CopyTable) -> Read:
        """Starts reading. Raises ConnectorError if the peer is gone (then nothing lands)."""

    def poll(self, read: Read) -> ReadState:
        """Makes progress and tells the state; never blocks, never raises for a dead peer (FAILED)."""

    def deliver(self, payload: bytes) -> None:
        """Takes a payload that the source's connector sent to this link. ConnectorError if it makes no sense."""

    def close(self) -> None:
        """Destroys the link; when it returns, no read of it can land. Idempotent."""


Send = Callable[[bytes], None]
"""Sends a payload to the other end's connector over the kv.v1 session; any thread."""


class Endpoint(Protocol):
    """One rank's end of all its links, as source and as reader."""

    @property
    def name(self) -> str:
        """nixl, nccl or local."""

    @property
    def pumped(self) -> bool:
        """Whether reads from us need our ``progress()``; if not, sources may sleep while others read."""

    def metadata(self) -> bytes:
        """What a reader needs to connect; opaque."""

    def connect(self, metadata: bytes, send: Send) -> Link:
        """Opens a link to the source that published ``metadata``. Raises ConnectorError with cause and remedy."""

    def accept(self, peer: str, send: Send) -> None:
        """Source side: a session with reader ``peer`` began."""

    def deliver(self, peer: str, payload: bytes) -> None:
        """Source side: takes a payload that ``peer``'s link sent. ConnectorError if it makes no sense: end the
        session.
        """

    def dismiss(self, peer: str) -> None:
        """Source side: the session with ``peer`` ended."""

    def progress(self) -> None:
        """Source side: lets reads of others advance; cheap; called every 0.5 to 2 ms while one may be open."""

    def close(self) -> None:
        """Ends all links and frees the region. Idempotent."""


class Connector(Endpoint, Protocol):
    """An endpoint in this process, with its region."""

    def allocate(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Allocates and registers the region: flat uint8. Called once."""


def check_table(table: CopyTable, source_bytes: int, target_bytes: int) -> None:
    """Raises ConnectorError if a range of ``table`` is empty, or leaves the peer's region or ours."""
    outside = table.outside(source_bytes, target_bytes)
    if outside is not None:
        raise ConnectorError(
            f"{outside} is outside the regions of {source_bytes} and {target_bytes} bytes; "
            "the peer announced blocks that it does not have, restart it"
        )
