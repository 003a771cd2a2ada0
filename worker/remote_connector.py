"""The connector of another rank, seen from rank 0: the same interface, carried over the rank's transfer channel.

So the exchange's state machines live on rank 0 alone, and each rank reads and is read for itself.

1. The rank has made its connector and region at start-up; ``RemoteConnector`` knows what it published.
2. ``connect``, ``deliver`` and ``Link.close`` wait for the rank's answer (a few milliseconds): a closed link is a
   fence. Reads are posted without waiting; the rank polls them and tells their end.
3. ``progress`` renews a lease: the rank makes progress by itself until the lease ends.
4. The reader thread takes what the rank says. When the channel ends unasked, the rank is lost: ``on_lost``.
5. ``close`` ends the channel and the reader.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from twinpool.engine.channel import Channel, ChannelClosed
from twinpool.kv_transfer.connectors.base import ConnectorError, Read, ReadState, Send
from twinpool.kv_transfer.copy_table import CopyTable
from twinpool.worker.rank_messages import Kind, TransferMessage

ANSWER_TIMEOUT_S = 30.0
LEASE_S = 0.1
"""How long a rank makes progress after it was asked to."""


@dataclass(slots=True)
class RemoteRead:
    """A read that the rank has been told to do."""

    num_bytes: int
    state: ReadState = ReadState.PENDING


class RemoteConnector:
    """Implements ``Endpoint``; see the module. Transfer thread only, unless said otherwise."""

    def __init__(
        self, rank: int, channel: Channel, name: str, pumped: bool, metadata: bytes, on_lost: Callable[[int], None]
    ) -> None:
        """``on_lost`` takes the rank, on another thread."""
        self._rank = rank
        self._channel = channel
        self._name = name
        self._pumped = pumped
        self._metadata = metadata
        self._on_lost = on_lost
        self._numbers = itertools.count(1)
        self._answers: queue.SimpleQueue[TransferMessage | None] = queue.SimpleQueue()
        self._links: dict[int, RemoteLink] = {}
        self._reads: dict[int, tuple[RemoteLink, RemoteRead]] = {}
        self._peers: dict[str, int] = {}
        self._senders: dict[int, Send] = {}
        self._lease_ends = 0.0
        self._closing = False
        self._reader = threading.Thread(target=self._receive, name=f"rank-{rank}", daemon=True)
        self._reader.start()

    @property
    def name(self) -> str:
        """The rank's connector."""
        return self._name

    @property
    def pumped(self) -> bool:
        """See ``Endpoint``."""
        return self._pumped

    def metadata(self) -> bytes:
        """What the rank published."""
        return self._metadata

    def connect(self, metadata: bytes, send: Send) -> RemoteLink:
        """See ``Endpoint``."""
        number = next(self._numbers)
        self._senders[number] = send
        answer = self.ask(Kind.CONNECT, number, metadata)
        if not answer.a:
            del self._senders[number]
            raise ConnectorError(answer.payload.decode())
        link = self._links[number] = RemoteLink(self, number, answer.payload.decode())
        return link

    def accept(self, peer: str, send: Send) -> None:
        """See ``Endpoint``."""
        number = self._peers[peer] = next(self._numbers)
        self._senders[number] = send
        self.tell(Kind.ACCEPT, number, payload=peer.encode())

    def deliver(self, peer: str, payload: bytes) -> None:
        """See ``Endpoint``."""
        answer = self.ask(Kind.DELIVER_PEER, self._peers[peer], payload)
        if not answer.a:
            raise ConnectorError(answer.payload.decode())

    def dismiss(self, peer: str) -> None:
        """See ``Endpoint``."""
        number = self._peers.pop(peer)
        del self._senders[number]
        self.tell(Kind.DISMISS, number)

    def progress(self) -> None:
        """Renews the rank's lease when half of it is over."""
        now = time.monotonic()
        if self._lease_ends - now < LEASE_S / 2:
            self._lease_ends = now + LEASE_S
            self.tell(Kind.PROGRESS)

    def expect_end(self) -> None:
        """From now on the rank's end is no loss. Any thread."""
        self._closing = True

    def close(self) -> None:
        """Closes the channel: if the rank still runs, it ends. Idempotent."""
        self._closing = True
        self._channel.close()
        self._reader.join(ANSWER_TIMEOUT_S)

    def tell(self, kind: Kind, a: int = 0, b: int = 0, payload: bytes = b"") -> None:
        """Sends a message without answer. To a rank that is gone nothing need be said: ``on_lost`` tells."""
        try:
            self._channel.send(*TransferMessage(kind, a, b, payload).encode())
        except ChannelClosed:
            return

    def ask(self, kind: Kind, number: int, payload: bytes = b"") -> TransferMessage:
        """Sends a message and waits for the answer.

        Raises:
            RuntimeError: the rank is gone or hangs; nobody knows what it still does.
        """
        self.tell(kind, number, payload=payload)
        try:
            answer = self._answers.get(timeout=ANSWER_TIMEOUT_S)
        except queue.Empty:
            answer = None
        if answer is None:
            self._answers.put(None)
            raise RuntimeError(f"rank {self._rank} of this worker does not answer")
        return answer

    def start_read(self, link: RemoteLink, table: CopyTable) -> RemoteRead:
        """For ``RemoteLink``."""
        number = next(self._numbers)
        read = RemoteRead(table.num_bytes)
        self._reads[number] = (link, read)
        self.tell(Kind.READ, link.number, number, table.encode())
        return read

    def forget(self, link: RemoteLink) -> None:
        """For ``RemoteLink``, once the rank has closed it."""
        self._links.pop(link.number, None)
        self._senders.pop(link.number, None)
        for number, (other, read) in list(self._reads.items()):
            if other is link:
                read.state = ReadState.FAILED
                self._reads.pop(number, None)

    def _receive(self) -> None:
        """The reader thread. Each table is changed by single operations, so no lock is needed."""
        try:
            while True:
                self._take(TransferMessage.decode(self._channel.receive()))
        except ChannelClosed:
            self._answers.put(None)
            if not self._closing:
                self._on_lost(self._rank)

    def _take(self, message: TransferMessage) -> None:
        if message.kind is Kind.REPLY:
            self._answers.put(message)
        elif message.kind is Kind.STATE:
            found = self._reads.pop(message.a, None)
            if found is not None:
                link, read = found
                if message.b:
                    link.transport = message.payload.decode()
                read.state = ReadState.DONE if message.b else ReadState.FAILED
        elif message.kind in (Kind.FROM_LINK, Kind.FROM_PEER):
            send = self._senders.get(message.a)
            if send is not None:
                send(message.payload)


class RemoteLink:
    """Implements ``Link`` for a link of another rank."""

    def __init__(self, connector: RemoteConnector, number: int, transport: str) -> None:
        self._connector = connector
        self.number = number
        self.transport = transport
        self._closed = False

    def read(self, table: CopyTable) -> RemoteRead:
        """See ``Link``; a peer that is gone shows as FAILED."""
        return self._connector.start_read(self, table)

    def poll(self, read: Read) -> ReadState:
        """What the rank last said."""
        assert isinstance(read, RemoteRead)
        return read.state

    def deliver(self, payload: bytes) -> None:
        """See ``Link``."""
        answer = self._connector.ask(Kind.DELIVER_LINK, self.number, payload)
        if not answer.a:
            raise ConnectorError(answer.payload.decode())

    def close(self) -> None:
        """See ``Link``: returns when the rank has destroyed the link."""
        if not self._closed:
            self._closed = True
            self._connector.ask(Kind.CLOSE, self.number)
            self._connector.forget(self)
