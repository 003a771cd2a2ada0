"""A rank's side of its transfer channel: its connector acts as rank 0 says.

1. The reader thread takes messages from the moment the process is up. When the channel ends, rank 0 is gone, and
   ``on_orphaned`` ends the process: whatever the other threads wait for will not come.
2. ``serve`` hands the connector over; from then on messages run on the transfer thread, which also polls the reads
   under way and makes progress while rank 0's lease lasts.
3. ``close`` ends the transfer thread and the connector.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial

from twinpool.engine.channel import Channel, ChannelClosed
from twinpool.kv_transfer.block_table import decode_table
from twinpool.kv_transfer.connectors.base import Connector, ConnectorError, Link, Read, ReadState
from twinpool.kv_transfer.imports import POLL_INTERVAL_S
from twinpool.kv_transfer.transfer_thread import PUMP_INTERVAL_S, TransferThread
from twinpool.worker.rank_messages import Kind, TransferMessage
from twinpool.worker.remote_connector import LEASE_S

log = logging.getLogger(__name__)


class RankTransfer:
    """See the module."""

    def __init__(
        self, channel: Channel, on_orphaned: Callable[[], None], on_error: Callable[[Exception], None]
    ) -> None:
        self._channel = channel
        self._on_orphaned = on_orphaned
        self._sending = threading.Lock()
        self._connector: Connector | None = None
        self._links: dict[int, Link] = {}
        self._reads: dict[int, tuple[int, Read]] = {}
        self._peers: dict[int, str] = {}
        self._progress_until = 0.0
        self._thread = TransferThread("transfer", self._tick, on_error)
        threading.Thread(target=self._receive, name="transfer-channel", daemon=True).start()

    def serve(self, connector: Connector) -> None:
        """Lets rank 0 use ``connector``, which now belongs to the transfer thread."""
        self._connector = connector
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, the links and the connector."""
        self._thread.stop()
        if self._connector is not None:
            self._connector.close()

    def _receive(self) -> None:
        try:
            while True:
                self._thread.post(partial(self._take, TransferMessage.decode(self._channel.receive())))
        except ChannelClosed:
            self._on_orphaned()

    def _send(self, kind: Kind, a: int, b: int = 0, payload: bytes = b"") -> None:
        with self._sending:
            try:
                self._channel.send(*TransferMessage(kind, a, b, payload).encode())
            except ChannelClosed:
                return  # the reader thread sees it, too

    def _take(self, message: TransferMessage) -> None:
        connector = self._connector
        assert connector is not None
        a, payload = message.a, message.payload
        match message.kind:
            case Kind.CONNECT:
                self._answer(partial(self._connect, connector, a, payload))
            case Kind.CLOSE:
                self._answer(partial(self._close_link, a))
            case Kind.DELIVER_LINK:
                self._answer(partial(self._deliver_link, a, payload))
            case Kind.DELIVER_PEER:
                self._answer(partial(self._deliver_peer, connector, a, payload))
            case Kind.READ:
                self._read(a, message.b, payload)
            case Kind.ACCEPT:
                self._peers[a] = payload.decode()
                connector.accept(self._peers[a], partial(self._from, Kind.FROM_PEER, a))
            case Kind.DISMISS:
                connector.dismiss(self._peers.pop(a))
            case Kind.PROGRESS:
                self._progress_until = time.monotonic() + LEASE_S
            case other:
                raise ValueError(f"rank 0 sent {other!r}")

    def _answer(self, action: Callable[[], str]) -> None:
        try:
            text = action()
        except ConnectorError as error:
            self._send(Kind.REPLY, 0, payload=str(error).encode())
        else:
            self._send(Kind.REPLY, 1, payload=text.encode())

    def _connect(self, connector: Connector, number: int, metadata: bytes) -> str:
        link = self._links[number] = connector.connect(metadata, partial(self._from, Kind.FROM_LINK, number))
        return link.transport

    def _close_link(self, number: int) -> str:
        self._links.pop(number).close()
        self._reads = {read: pair for read, pair in self._reads.items() if pair[0] != number}
        return ""

    def _deliver_link(self, number: int, payload: bytes) -> str:
        self._links[number].deliver(payload)
        return ""

    def _deliver_peer(self, connector: Connector, number: int, payload: bytes) -> str:
        connector.deliver(self._peers[number], payload)
        return ""

    def _from(self, kind: Kind, number: int, payload: bytes) -> None:
        self._send(kind, number, payload=payload)

    def _read(self, link: int, number: int, payload: bytes) -> None:
        try:
            read = self._links[link].read(decode_table(payload))
        except (ConnectorError, ValueError) as error:
            log.warning("a read cannot start: %s", error)
            self._send(Kind.STATE, number, 0)
            return
        self._reads[number] = (link, read)

    def _tick(self, now: float) -> float | None:
        for number, (link, read) in list(self._reads.items()):
            state = self._links[link].poll(read)
            if state is not ReadState.PENDING:
                del self._reads[number]
                self._send(Kind.STATE, number, int(state is ReadState.DONE), self._links[link].transport.encode())
        due = now + POLL_INTERVAL_S if self._reads else None
        if now < self._progress_until and self._connector is not None:
            self._connector.progress()
            due = now + PUMP_INTERVAL_S if due is None else due
        return due
