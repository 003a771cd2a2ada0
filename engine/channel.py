"""The control channel between rank 0 and another rank of its worker: whole messages of bytes, in order, never pickled.

Who makes a channel closes it. A closed or dead other end shows as ``ChannelClosed`` at the next call.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Sequence
from typing import Protocol

_LENGTH = struct.Struct("<Q")
MAX_BYTES = 1 << 32
"""Larger messages do not occur: a length beyond this means that the stream is not ours."""

Data = bytes | memoryview


class ChannelClosed(ConnectionError):
    """The other end closed the channel or died."""


class Channel(Protocol):
    """One end. One thread sends, one thread receives."""

    def fileno(self) -> int:
        """Readable, for ``select``, when ``receive`` has something to return or to raise."""

    def send(self, *parts: Data) -> None:
        """Sends one message, the concatenation of ``parts``. Blocks while buffers are full."""

    def receive(self) -> bytes:
        """Blocks for the next message."""

    def close(self) -> None:
        """Closes this end, and wakes whoever blocks on it. Idempotent."""


class SocketChannel:
    """A channel over a connected stream socket, which it owns."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        self._connection = connection

    def fileno(self) -> int:
        """See ``Channel``."""
        return self._connection.fileno()

    def send(self, *parts: Data) -> None:
        """See ``Channel``."""
        views = [memoryview(part).cast("B") for part in parts]
        buffers = [memoryview(_LENGTH.pack(sum(len(view) for view in views))), *views]
        try:
            sent = self._connection.sendmsg(buffers)
            for left in _after(buffers, sent):
                self._connection.sendall(left)
        except OSError as error:
            raise ChannelClosed(f"the other end of the control channel is gone ({error})") from error

    def receive(self) -> bytes:
        """See ``Channel``."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > MAX_BYTES:
            raise ChannelClosed(f"the other end sent a message of {length} bytes; it does not speak this protocol")
        return bytes(self._read(length))

    def _read(self, length: int) -> bytearray:
        data = bytearray(length)
        view = memoryview(data)
        try:
            while view:
                count = self._connection.recv_into(view)
                if count == 0:
                    raise ChannelClosed("the other end of the control channel is gone")
                view = view[count:]
        except OSError as error:
            raise ChannelClosed(f"the other end of the control channel is gone ({error})") from error
        return data

    def close(self) -> None:
        """See ``Channel``."""
        with contextlib.suppress(OSError):  # not connected any more
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def _after(buffers: Sequence[memoryview], sent: int) -> list[memoryview]:
    """What of ``buffers`` follows the first ``sent`` bytes."""
    left = []
    for buffer in buffers:
        if sent < len(buffer):
            left.append(buffer[sent:])
        sent = max(0, sent - len(buffer))
    return left
