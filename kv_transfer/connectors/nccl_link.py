"""A reader's pair with one source, for the nccl connector.

1. Reads are cut into slices. Each is received into a buffer of the link's own: at most ``WINDOW`` buffers, so a source
   never sends what nobody has room for. A slice is asked for (``ReadSlice``) when its receive is queued.
2. ``poll`` copies what has arrived into the region, a bounded number of slices at a time, and asks for more. Nothing
   else writes into the region, so ``close`` fences by being called on the same thread: what arrives later arrives in
   buffers that nobody reads.
3. A dead peer breaks the process group; a source that gives up says so (``EndPair``). Then every read FAILED.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from twinpool.kv_transfer.connectors.base import ConnectorError, Read, ReadState, Send, check_table
from twinpool.kv_transfer.connectors.pair_backends import GlooBackend, NcclBackend, PairBackend
from twinpool.kv_transfer.connectors.pair_group import Operation, PairGroup
from twinpool.kv_transfer.connectors.pair_messages import (
    MAX_RANGES,
    EndPair,
    OpenPair,
    PairKey,
    ReadSlice,
    Transport,
    decode,
    encode,
)
from twinpool.kv_transfer.connectors.pair_store import PairStore
from twinpool.kv_transfer.connectors.staging import Staging, new_stream, record_event
from twinpool.kv_transfer.copy_table import CopyTable

SLICE_BYTES = 4 << 20
WINDOW = 4
SLICES_PER_POLL = 2
"""Copied into the region per poll: about a millisecond."""


@dataclass(slots=True)
class NcclRead:
    """A read of which ``slices_left`` have not been copied yet."""

    num_bytes: int
    slices_left: int
    state: ReadState = ReadState.PENDING


@dataclass(slots=True)
class _Slice:
    """Part of a read, on its way into ``buffer``; ``copied`` is recorded behind the copy on a GPU."""

    read: NcclRead
    table: CopyTable
    buffer: torch.Tensor
    copied: Any = None


@dataclass(slots=True)
class _Traffic:
    """Slices by progress. ``received`` is filled by the pair's thread."""

    waiting: deque[tuple[NcclRead, CopyTable]] = field(default_factory=deque)
    received: deque[_Slice] = field(default_factory=deque)
    copying: deque[_Slice] = field(default_factory=deque)
    buffers: list[torch.Tensor] = field(default_factory=list)
    num_buffers: int = 0


class NcclLink:
    """See the module. Transfer thread only."""

    def __init__(
        self,
        pair: int,
        nonce: bytes,
        source_bytes: int,
        transport: Transport,
        region: torch.Tensor,
        listener: Any,
        send: Send,
        connect_timeout_s: float,
    ) -> None:
        self._pair = pair
        self._source_bytes = source_bytes
        self._region = region
        self._transport = transport
        self._send = send
        self._failure: str | None = None
        self._closed = False
        self._staging = Staging(region, transport, SLICE_BYTES)
        self._stream = new_stream(region.device) if region.device.type == "cuda" else None
        self._traffic = _Traffic()
        # Before the store can send a key.
        send(encode(OpenPair(pair, nonce, transport)))
        self._store = PairStore(lambda key, value: send(encode(PairKey(pair, key, value))), connect_timeout_s)
        if transport == "nccl":
            build: Callable[[], PairBackend] = partial(NcclBackend, True, self._store, region.device)
        else:
            build = partial(GlooBackend, True, self._store, listener, connect_timeout_s)
        self._group = PairGroup(build, self._store, self._group_failed)

    @property
    def transport(self) -> str:
        """nccl/nccl between GPUs, nccl/gloo otherwise."""
        return f"nccl/{self._transport}"

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def read(self, table: CopyTable) -> NcclRead:
        """Asks for the first slices. Raises ConnectorError if the peer is known to be gone."""
        check_table(table, self._source_bytes, self._region.numel())
        if self._closed or self._failure is not None:
            raise ConnectorError(f"the link is closed ({self._failure or 'by us'}); link again")
        slices = table.slices(SLICE_BYTES, MAX_RANGES)
        read = NcclRead(table.num_bytes, len(slices))
        self._traffic.waiting.extend((read, part) for part in slices)
        self._ask()
        return read

    def poll(self, read: Read) -> ReadState:
        """Copies what has arrived, for whichever read, and tells the state of this one."""
        assert isinstance(read, NcclRead)
        if read.state is not ReadState.PENDING:
            return read.state
        if self._closed or self._failure is not None:
            self._settle()
            read.state = ReadState.FAILED
            return read.state
        traffic = self._traffic
        for _ in range(min(SLICES_PER_POLL, len(traffic.received))):
            self._copy(traffic.received.popleft())
        while traffic.copying and (traffic.copying[0].copied is None or traffic.copying[0].copied.query()):
            item = traffic.copying.popleft()
            traffic.buffers.append(item.buffer)
            item.read.slices_left -= 1
            if item.read.slices_left == 0:
                item.read.state = ReadState.DONE
        self._ask()
        return read.state

    def deliver(self, payload: bytes) -> None:
        """Takes the source's rendezvous keys, and its word that it is over."""
        message = decode(payload)
        if message.pair != self._pair or self._closed:
            return
        match message:
            case PairKey(_, key, value):
                self._store.put(key, value)
            case EndPair(_, reason):
                self._failure = self._failure or f"the source ended the pair: {reason}"
            case _:
                raise ConnectorError("a source sent what only a reader says; run equal versions")

    def close(self) -> None:
        """Ends the pair, and tells the source. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._settle()
        self._group.close()
        self._send(encode(EndPair(self._pair, "closed by the reader")))

    def join(self, timeout_s: float) -> None:
        """Waits for the thread of a closed link."""
        self._group.join(timeout_s)

    def _group_failed(self, reason: str) -> None:
        """On the pair's thread."""
        self._failure = self._failure or reason

    def _ask(self) -> None:
        """Asks for slices as long as there are buffers for them."""
        traffic = self._traffic
        while traffic.waiting:
            if not traffic.buffers:
                if traffic.num_buffers == WINDOW:
                    return
                traffic.num_buffers += 1
                traffic.buffers.append(self._staging.buffer())
            read, table = traffic.waiting.popleft()
            self._send(encode(ReadSlice(self._pair, tuple((item.source, item.length) for item in table))))
            self._receive(_Slice(read, table, traffic.buffers.pop()))

    def _receive(self, item: _Slice) -> None:
        part = item.buffer[: item.table.num_bytes]
        received: Callable[[_Slice], None] = self._traffic.received.append
        self._group.post(Operation(lambda: part, lambda: received(item)))

    def _copy(self, item: _Slice) -> None:
        targets = [(each.target, each.length) for each in item.table]
        if self._stream is None:
            self._staging.scatter(item.buffer, targets)
        else:
            with torch.cuda.stream(self._stream):
                self._staging.scatter(item.buffer, targets)
                item.copied = record_event()
        self._traffic.copying.append(item)

    def _settle(self) -> None:
        """Nothing is written into the region after this; a copy on a GPU is waited for."""
        self._traffic.waiting.clear()
        self._traffic.received.clear()
        if self._stream is not None:
            self._stream.synchronize()
        self._traffic.copying.clear()
