"""How ranks on other machines get their two channels: they dial rank 0.

1. ``RankDials`` listens on one address and draws a random token for each channel of each rank; whoever places the rank
   hands it its tokens.
2. The rank ``dial``s twice. Each connection begins with a fixed-size hello, in bounded time: rank, plane and token. The
   token is compared in constant time and counts once; whatever else comes is closed without a word.
3. When all ranks have dialled, or on ``close``, the listener closes. A channel that can no longer come raises
   ``ChannelClosed`` in whoever waits for it.

A token proves the rank to rank 0. That rank 0 is who it seems follows from where the address came from.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import Future, InvalidStateError

from twinpool.engine.channel import Channel, ChannelClosed, Data, SocketChannel

HANDSHAKE_S = 10.0
MAX_HANDSHAKES = 32
"""Connections that may be in the handshake at once; more wait in the kernel."""
KEEPALIVE_S = 5
"""The other machine is asked after so long a silence, and taken for gone after four times as long."""
_TOKEN_BYTES = 32
_HELLO = struct.Struct(f"<4sHH{_TOKEN_BYTES}s")
_MAGIC = b"TPR1"
_WELCOME = b"\x01"
_PLANES = 2


class DialledChannel:
    """A ``Channel`` whose connection is still to come; its first use waits for it. ``close`` gives it up."""

    def __init__(self) -> None:
        self._connection: Future[Channel] = Future()

    def connected(self, channel: Channel) -> None:
        """The connection is there; closed at once if nobody wants it any more."""
        try:
            self._connection.set_result(channel)
        except InvalidStateError:
            channel.close()

    def give_up(self, why: str) -> None:
        """It will not come. Without effect once it is there."""
        with contextlib.suppress(InvalidStateError):
            self._connection.set_exception(ChannelClosed(why))

    def fileno(self) -> int:
        """See ``Channel``."""
        return self._connection.result().fileno()

    def send(self, *parts: Data) -> None:
        """See ``Channel``."""
        self._connection.result().send(*parts)

    def receive(self) -> bytes:
        """See ``Channel``."""
        return self._connection.result().receive()

    def close(self) -> None:
        """See ``Channel``."""
        self.give_up("closed before the rank dialled")
        if self._connection.exception() is None:
            self._connection.result().close()


class RankDials:
    """Rank 0's side; see the module. ``port`` is the one that the kernel picked."""

    def __init__(self, host: str, ranks: Iterable[int]) -> None:
        """Listens on ``host``. Raises OSError if that is no address of this machine."""
        self._tokens = {(rank, plane): secrets.token_bytes(_TOKEN_BYTES) for rank in ranks for plane in range(_PLANES)}
        self._channels = {slot: DialledChannel() for slot in self._tokens}
        self._lock = threading.Lock()
        self._handshakes = threading.BoundedSemaphore(MAX_HANDSHAKES)
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.bind(address)
        self._listener.listen()
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="rank-dials", daemon=True).start()

    def tokens(self, rank: int) -> str:
        """What rank ``rank`` needs to know, hexadecimal, for ``dial``."""
        with self._lock:
            return b"".join(self._tokens[rank, plane] for plane in range(_PLANES)).hex()

    def channels(self, rank: int) -> tuple[DialledChannel, DialledChannel]:
        """Step and transfer channel of a rank, at once; they connect when it dials."""
        return self._channels[rank, 0], self._channels[rank, 1]

    def give_up(self, rank: int, why: str) -> None:
        """Rank ``rank`` will not dial any more."""
        for channel in self.channels(rank):
            channel.give_up(why)

    def close(self) -> None:
        """Stops listening. Idempotent; connections live on."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()

    def _accept(self) -> None:
        while True:
            self._handshakes.acquire()
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._shake_hands, args=(connection,), daemon=True).start()

    def _shake_hands(self, connection: socket.socket) -> None:
        try:
            slot = self._authenticate(connection)
        except (OSError, struct.error):
            slot = None
        finally:
            self._handshakes.release()
        if slot is None:
            connection.close()
            return
        self._channels[slot].connected(SocketChannel(connection))
        with self._lock:
            done = not self._tokens
        if done:
            self.close()

    def _authenticate(self, connection: socket.socket) -> tuple[int, int] | None:
        connection.settimeout(HANDSHAKE_S)
        _tune(connection)
        magic, rank, plane, token = _HELLO.unpack(_read(connection, _HELLO.size))
        slot = (rank, plane)
        with self._lock:
            expected = self._tokens.get(slot, b"")
            if magic != _MAGIC or not hmac.compare_digest(token, expected):
                return None
            del self._tokens[slot]
        connection.sendall(_WELCOME)
        return slot


def dial(host: str, port: int, rank: int, tokens: str) -> tuple[SocketChannel, SocketChannel, str]:
    """Step and transfer channel of rank ``rank``, and the address of this machine from which it dialled.

    Raises:
        OSError: rank 0 is not there or does not know us.
    """
    secret = bytes.fromhex(tokens)
    connections = []
    for plane in range(_PLANES):
        connection = socket.create_connection((host, port), HANDSHAKE_S)
        _tune(connection)
        token = secret[plane * _TOKEN_BYTES : (plane + 1) * _TOKEN_BYTES]
        connection.sendall(_HELLO.pack(_MAGIC, rank, plane, token))
        if _read(connection, len(_WELCOME)) != _WELCOME:
            raise ConnectionError(f"{host}:{port} does not speak this protocol; run equal versions")
        connections.append(connection)
    own: str = connections[0].getsockname()[0]
    step, transfer = map(SocketChannel, connections)
    return step, transfer, own


def _tune(connection: socket.socket) -> None:
    """Steps are small messages that must not wait; and a machine that vanished must show, as a closed channel."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 4000 * KEEPALIVE_S)


def _read(connection: socket.socket, length: int) -> bytes:
    data = connection.recv(length, socket.MSG_WAITALL)
    if len(data) < length:
        raise ConnectionError("the other end closed the connection in the handshake")
    return data
