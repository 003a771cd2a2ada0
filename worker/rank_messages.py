"""What rank 0 and another rank of its worker say to each other outside steps.

While a rank starts, JSON on the step channel, in this order: ``Up`` from the rank, ``Start`` to it, ``Loaded`` from it,
``Allocate`` to it, ``Allocated`` from it; ``Failed`` instead of any of the rank's. Then the channel carries steps (see
``engine.rank``), and the transfer channel carries ``TransferMessage``.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from twinpool.config import Config

_HEADER = struct.Struct("<BQQ")


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")

    def encode(self) -> bytes:
        """The JSON form."""
        return self.model_dump_json().encode()


class Up(_Message):
    """The rank's process runs."""

    kind: Literal["up"] = "up"


class Start(_Message):
    """Which rank it is; the store of the process group is served at ``group_host``:``group_port`` by rank 0."""

    kind: Literal["start"] = "start"
    config: Config
    role: Literal["prefill", "decode"]
    rank: int
    local_rank: int
    num_local: int
    model_folder: str
    group_host: str
    group_port: int


class Loaded(_Message):
    """Weights are loaded; the rank can hold ``num_blocks`` KV blocks."""

    kind: Literal["loaded"] = "loaded"
    num_blocks: int


class Allocate(_Message):
    """KV blocks of every rank."""

    kind: Literal["allocate"] = "allocate"
    num_blocks: int


class Allocated(_Message):
    """The rank is ready; what readers of its region need."""

    kind: Literal["allocated"] = "allocated"
    connector: str
    pumped: bool
    metadata: bytes


class Failed(_Message):
    """The rank cannot start: cause and remedy."""

    kind: Literal["failed"] = "failed"
    message: str


FromRank = Up | Loaded | Allocated | Failed
FROM_RANK: TypeAdapter[FromRank] = TypeAdapter(Annotated[FromRank, Field(discriminator="kind")])


class Kind(enum.IntEnum):
    """What a ``TransferMessage`` says; ``link``, ``read`` and ``peer`` are numbers that rank 0 gave.

    To the rank: CONNECT(link, payload = metadata), CLOSE(link), DELIVER_LINK(link, payload) and
    DELIVER_PEER(peer, payload) are answered by REPLY(1 if it worked, payload = text), in order. READ(link, read,
    payload = an encoded ``CopyTable``) is answered by STATE(read, 1 if done, payload = transport). ACCEPT(peer,
    payload = its name), DISMISS(peer), PROGRESS (make progress for a while). From the rank also: FROM_LINK(link,
    payload), FROM_PEER(peer, payload).
    """

    CONNECT = 1
    CLOSE = 2
    DELIVER_LINK = 3
    DELIVER_PEER = 4
    READ = 5
    ACCEPT = 6
    DISMISS = 7
    PROGRESS = 8
    REPLY = 9
    STATE = 10
    FROM_LINK = 11
    FROM_PEER = 12


@dataclass(frozen=True, slots=True)
class TransferMessage:
    """One message; see ``Kind`` for the numbers."""

    kind: Kind
    a: int = 0
    b: int = 0
    payload: bytes = b""

    def encode(self) -> tuple[bytes, bytes]:
        """Header and payload."""
        return _HEADER.pack(self.kind, self.a, self.b), self.payload

    @classmethod
    def decode(cls, message: bytes) -> TransferMessage:
        """The inverse of ``encode``."""
        kind, a, b = _HEADER.unpack_from(message)
        return cls(Kind(kind), a, b, message[_HEADER.size :])
