"""What the two sides of an exchange say to each other; services translate these from and to kv.proto."""

from __future__ import annotations

from dataclasses import dataclass

LINK_TRANSFER_ID = 0
"""Reserved: ``Open(0)`` means that reads are pending outside any exchange (a warm-up, a cancelled exchange that
drains), so that the source makes progress; ``Done(0)`` that none are left. Neither is answered."""


@dataclass(frozen=True, slots=True)
class Open:
    """Decode joins an exchange."""

    transfer_id: int


@dataclass(frozen=True, slots=True)
class Done:
    """Decode has read all that it will read of this exchange; may come before Final."""

    transfer_id: int


@dataclass(frozen=True, slots=True)
class Abandon:
    """Decode leaves an exchange."""

    transfer_id: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Prefill: layers ``[layer_start, layer_end)`` of the request's blocks from ``first_block`` may be read."""

    transfer_id: int
    rank: int
    first_block: int
    block_ids: tuple[int, ...]
    layer_start: int
    layer_end: int


@dataclass(frozen=True, slots=True)
class First:
    """First token of one choice; ``finish`` is "", "stop" or "length". ``logprob`` is (logprob, rank, top pairs)."""

    choice: int
    token_id: int
    finish: str = ""
    logprob: tuple[float, int, tuple[tuple[int, float], ...]] | None = None


@dataclass(frozen=True, slots=True)
class Final:
    """Prefill: everything is announced, and these tokens were sampled."""

    transfer_id: int
    num_tokens: int
    first_tokens: tuple[First, ...]


@dataclass(frozen=True, slots=True)
class Released:
    """Prefill answers Done; only ``valid`` makes the copy usable."""

    transfer_id: int
    valid: bool


@dataclass(frozen=True, slots=True)
class Gone:
    """Prefill: the exchange ended early, was refused or is unknown."""

    transfer_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class ConnectorMessage:
    """Payload between the connectors of a pair: rank ``source`` of prefill and rank ``target`` of decode."""

    source: int
    target: int
    payload: bytes


FromDecode = Open | Done | Abandon | ConnectorMessage
FromPrefill = Segment | Final | Released | Gone | ConnectorMessage
