"""What the two ends of an nccl pair say to each other over their session, before and beside the bytes themselves.

A payload is one byte of kind, the pair's random 64-bit number (chosen by the reader; one session may carry several
pairs, one after the other), and a body. Little-endian throughout. Nothing is larger than 17 KiB.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Literal

from twinpool.kv_transfer.connectors.base import ConnectorError

Transport = Literal["gloo", "nccl"]

MAX_RANGES = 1024
"""Ranges of one ReadSlice."""
MAX_TEXT = 4096
"""Bytes of a key, a value or a reason."""

_HEAD = struct.Struct("<BQ")
_OPEN = struct.Struct("<16s4s")
_KEY = struct.Struct("<H")
_RANGE_BYTES = 16
_OPENED, _KEYED, _ASKED, _ENDED = 1, 2, 3, 4
_TRANSPORTS: dict[bytes, Transport] = {b"gloo": "gloo", b"nccl": "nccl"}


@dataclass(frozen=True, slots=True)
class OpenPair:
    """Reader: makes a pair with the region that carries ``nonce``."""

    pair: int
    nonce: bytes
    transport: Transport


@dataclass(frozen=True, slots=True)
class PairKey:
    """Either: a rendezvous key was set."""

    pair: int
    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class ReadSlice:
    """Reader: send these (offset, length) of your region, as one message, after those asked for before."""

    pair: int
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class EndPair:
    """Either: the pair is over."""

    pair: int
    reason: str


PairMessage = OpenPair | PairKey | ReadSlice | EndPair


def encode(message: PairMessage) -> bytes:
    """The payload."""
    match message:
        case OpenPair(pair, nonce, transport):
            return _HEAD.pack(_OPENED, pair) + _OPEN.pack(nonce, transport.encode())
        case PairKey(pair, key, value):
            name = key.encode()
            return _HEAD.pack(_KEYED, pair) + _KEY.pack(len(name)) + name + value
        case ReadSlice(pair, ranges):
            numbers = [number for item in ranges for number in item]
            return _HEAD.pack(_ASKED, pair) + struct.pack(f"<{len(numbers)}Q", *numbers)
        case EndPair(pair, reason):
            return _HEAD.pack(_ENDED, pair) + reason.encode()[:MAX_TEXT]


def decode(payload: bytes) -> PairMessage:
    """The message. Raises ConnectorError if ``payload`` is none."""
    try:
        kind, pair = _HEAD.unpack_from(payload)
        body = payload[_HEAD.size :]
        if kind == _OPENED:
            nonce, transport = _OPEN.unpack(body)
            return OpenPair(pair, nonce, _TRANSPORTS[transport])
        if kind == _KEYED:
            (length,) = _KEY.unpack_from(body)
            key, value = body[_KEY.size : _KEY.size + length], body[_KEY.size + length :]
            if not 0 < length == len(key) <= MAX_TEXT or len(value) > MAX_TEXT:
                raise ValueError("a key or value of senseless length")
            return PairKey(pair, key.decode(), value)
        if kind == _ASKED:
            numbers = struct.unpack(f"<{len(body) // 8}Q", body)
            if not 0 < len(body) <= MAX_RANGES * _RANGE_BYTES or len(body) % _RANGE_BYTES:
                raise ValueError("a senseless number of ranges")
            return ReadSlice(pair, tuple(zip(numbers[::2], numbers[1::2], strict=True)))
        if kind == _ENDED:
            return EndPair(pair, body[:MAX_TEXT].decode(errors="replace"))
        raise ValueError(f"unknown kind {kind}")
    except (struct.error, ValueError, KeyError) as error:
        raise ConnectorError(f"not a payload of an nccl connector ({error}); run equal versions") from error
