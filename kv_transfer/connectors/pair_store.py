"""The rendezvous of one pair's process group, carried by the pair's own authenticated session.

torch's own TCPStore would listen on a port of its own, on every interface by default, and ask nobody who they are.
Here ``set`` sends the key to the peer, ``put`` takes the peer's, and whoever waits for a key waits here, until
``timeout_s`` or ``close``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from twinpool.kv_transfer.connectors.base import ConnectorError

MAX_KEYS = 64


class PairStore(Store):
    """A torch Store of two; any thread. Python's names are those that torch's trampoline looks up."""

    def __init__(self, send: Callable[[str, bytes], None], timeout_s: float) -> None:
        super().__init__()
        self._send = send
        self._timeout_s = timeout_s
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._closed = False

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        """Sets a key here and at the peer."""
        self.put(key, value)
        self._send(key, value)

    def put(self, key: str, value: bytes) -> None:
        """The peer has set a key. ConnectorError if it sets too many."""
        with self._changed:
            if len(self._values) >= MAX_KEYS:
                raise ConnectorError(f"more than {MAX_KEYS} rendezvous keys for one pair; run equal versions")
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        """Waits for a key. ConnectorError after the timeout or ``close``."""
        self.wait([key])
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits for all keys, at most the smaller of both timeouts. ConnectorError as ``get``."""
        bound = self._timeout_s if timeout is None else min(self._timeout_s, timeout.total_seconds())
        with self._changed:
            there = self._changed.wait_for(lambda: self._closed or self.check(keys), bound)
            if self._closed:
                raise ConnectorError("the pair is closed")
            if not there:
                raise ConnectorError(f"the other end did not connect within {bound:g} s; check that it runs")

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are set."""
        return all(key in self._values for key in keys)

    def clone(self) -> PairStore:
        """NCCL's monitors want a store of their own: this one serves all threads."""
        return self

    def close(self) -> None:
        """Ends all waiting, now and later. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
