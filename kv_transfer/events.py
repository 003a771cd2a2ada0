"""What the decode side of the exchange tells its owner, through one callback, on the transfer thread.

Per exchange: ``Readable`` (at most once), then exactly one of ``Loaded``, ``Finished`` and ``Lost`` (none of them after
``abandon``). ``Safe`` follows exactly once for each exchange that was told ``reserved`` and did not end in ``Loaded``;
it never comes before ``Finished`` or ``Lost``. Per link: ``LinkUp`` at most once, ``LinkDown`` once.
"""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.kv_transfer.messages import First


@dataclass(frozen=True, slots=True)
class Readable:
    """The first segment may be read: the request may reserve its blocks."""

    transfer_id: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """The copy is complete and confirmed; only now may it be used.

    ``transfer_s``: first segment readable to confirmed. ``exposed_transfer_s``: prompt computed (Final received) to
    confirmed. ``read_s``: a read in flight. ``sample_s``: last segment to Final. ``confirm_s``: Done and
    Final to confirmed, which was at ``confirmed_at`` (the table's clock). ``transport`` is "" if nothing was read.
    """

    transfer_id: int
    first_tokens: tuple[First, ...]
    transfer_s: float
    exposed_transfer_s: float
    transfer_bytes: int
    transport: str
    read_s: float = 0.0
    sample_s: float = 0.0
    confirm_s: float = 0.0
    confirmed_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Finished:
    """Every choice ended with its first token on the prefill worker; nothing is left to do here."""

    transfer_id: int


@dataclass(frozen=True, slots=True)
class Lost:
    """The exchange failed; ``reason`` is for people."""

    transfer_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Safe:
    """No read of this exchange can land any more: its destination blocks may be used for something else."""

    transfer_id: int


@dataclass(frozen=True, slots=True)
class LinkUp:
    """The warm-up reads worked: exchanges with ``peer`` may be opened. ``gbps`` is gigabytes per second."""

    peer: str
    epoch: int
    transport: str
    gbps: float


@dataclass(frozen=True, slots=True)
class LinkDown:
    """The link cannot be used (any more) and is closed; all its exchanges are lost. It may be linked again."""

    peer: str
    epoch: int
    reason: str


Event = Readable | Loaded | Finished | Lost | Safe | LinkUp | LinkDown
