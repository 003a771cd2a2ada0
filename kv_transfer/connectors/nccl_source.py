"""A source's pair with one reader, for the nccl connector.

It sends what it is asked for, in order, on the pair's thread: straight from the region where a slice is one range,
else gathered into a buffer. Whether the bytes are still what was announced is not decided here: the reader uses
nothing that the exchange does not confirm afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from twinpool.kv_transfer.connectors.base import ConnectorError, Send
from twinpool.kv_transfer.connectors.nccl_link import SLICE_BYTES, WINDOW
from twinpool.kv_transfer.connectors.pair_backends import GlooBackend, NcclBackend, PairBackend
from twinpool.kv_transfer.connectors.pair_group import MAX_UNDER_WAY, Operation, PairGroup
from twinpool.kv_transfer.connectors.pair_messages import EndPair, OpenPair, PairKey, ReadSlice, encode
from twinpool.kv_transfer.connectors.pair_store import PairStore
from twinpool.kv_transfer.connectors.staging import Staging


class NcclSource:
    """See the module. Transfer thread, except what the pair's thread calls."""

    def __init__(
        self, opened: OpenPair, region: torch.Tensor, listener: Any, send: Send, connect_timeout_s: float
    ) -> None:
        self._pair = opened.pair
        self._region = region
        self._send = send
        self._staging = Staging(region, opened.transport, SLICE_BYTES)
        self._lock = threading.Lock()
        self._buffers: list[torch.Tensor] = []
        self._asked = 0
        self._store = PairStore(lambda key, value: send(encode(PairKey(opened.pair, key, value))), connect_timeout_s)
        if opened.transport == "nccl":
            build: Callable[[], PairBackend] = partial(NcclBackend, False, self._store, region.device)
        else:
            build = partial(GlooBackend, False, self._store, listener, connect_timeout_s)
        self._group = PairGroup(build, self._store, self._group_failed)

    def key(self, message: PairKey) -> None:
        """The reader's rendezvous key."""
        self._store.put(message.key, message.value)

    def read(self, message: ReadSlice) -> None:
        """Queues a send. Raises ConnectorError if the reader asks for more than it may."""
        region_bytes = self._region.numel()
        for offset, length in message.ranges:
            if length == 0 or offset + length > region_bytes:
                raise ConnectorError(
                    f"a reader asks for {length} bytes at {offset} of a region of {region_bytes}; run equal versions"
                )
        if sum(length for _, length in message.ranges) > SLICE_BYTES:
            raise ConnectorError(f"a reader asks for more than {SLICE_BYTES} bytes at once; run equal versions")
        with self._lock:
            # Those that have arrived, but of whose end we have not heard yet, count too.
            if self._asked >= WINDOW + MAX_UNDER_WAY:
                raise ConnectorError(f"a reader asks for more than {WINDOW} slices ahead; run equal versions")
            self._asked += 1
        used: list[torch.Tensor] = []
        self._group.post(Operation(lambda: self._prepare(message, used), lambda: self._sent(used)))

    def close(self) -> None:
        """Ends the pair; never blocks."""
        self._group.close()

    def join(self, timeout_s: float) -> None:
        """Waits for the thread of a closed pair."""
        self._group.join(timeout_s)

    def _prepare(self, message: ReadSlice, used: list[torch.Tensor]) -> torch.Tensor:
        if len(message.ranges) == 1 and self._staging.direct:
            offset, length = message.ranges[0]
            return self._region[offset : offset + length]
        with self._lock:
            buffer = self._buffers.pop() if self._buffers else self._staging.buffer()
        used.append(buffer)
        self._staging.gather(message.ranges, buffer)
        return buffer[: sum(length for _, length in message.ranges)]

    def _sent(self, used: list[torch.Tensor]) -> None:
        with self._lock:
            self._buffers.extend(used)
            self._asked -= 1

    def _group_failed(self, reason: str) -> None:
        """On the pair's thread."""
        self._send(encode(EndPair(self._pair, reason)))
