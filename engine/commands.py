"""Commands to an engine: what other threads ask of the engine thread, in order of arrival."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.engine.request import FailureCode, FinishReason, Request, TokenLogprob


@dataclass(frozen=True, slots=True)
class Submit:
    """Starts an attempt. ``request.sampling.n`` choices come from it."""

    request: Request


@dataclass(frozen=True, slots=True)
class Cancel:
    """Ends an attempt; unknown ids are ignored. Nothing is emitted for it any more."""

    attempt_id: int


@dataclass(frozen=True, slots=True)
class CancelOrigin:
    """Ends all attempts of a session that is gone."""

    origin: int


@dataclass(frozen=True, slots=True)
class RemoteReadable:
    """Decode: the first segment of an exchange is readable; the request may reserve its blocks."""

    transfer_id: int


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Decode: what prefill sampled for one choice; ``finish`` is set when the choice ended with it."""

    choice: int
    token_id: int
    finish: FinishReason | None = None
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class RemoteLoaded:
    """Decode: the copy is confirmed; only now are blocks hashed and used. Also sent on a full hit (nothing read).

    Durations as in ``RequestStats``; ``confirmed_at`` is on the engine's clock, None if nobody knows.
    """

    transfer_id: int
    first_tokens: tuple[FirstToken, ...]
    transfer_s: float
    exposed_transfer_s: float
    transfer_bytes: int
    transport: str
    read_s: float = 0.0
    sample_s: float = 0.0
    confirm_s: float = 0.0
    confirmed_at: float | None = None


@dataclass(frozen=True, slots=True)
class RemoteFinished:
    """Decode: every choice ended with its first token, on prefill; decode frees and says nothing."""

    transfer_id: int


@dataclass(frozen=True, slots=True)
class RemoteLost:
    """Decode: the exchange failed; the attempt ends with ``code``. Destination blocks stay until DestinationSafe."""

    transfer_id: int
    code: FailureCode
    reason: str


@dataclass(frozen=True, slots=True)
class DestinationSafe:
    """Decode: no read of this exchange can land any more; quarantined blocks return to the pool.

    Sent exactly once for each exchange that was told ``reserved`` and did not end in RemoteLoaded.
    """

    transfer_id: int


@dataclass(frozen=True, slots=True)
class HoldEnded:
    """Prefill: a hold was released, revoked by its session's end, or expired; its blocks may be freed."""

    transfer_id: int


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Forgets all cached blocks that no request uses."""


@dataclass(frozen=True, slots=True)
class GrammarReady:
    """The attempt's constraint is compiled; the request may be admitted."""

    attempt_id: int


@dataclass(frozen=True, slots=True)
class GrammarFailed:
    """The attempt's constraint cannot be compiled; the attempt alone fails with INVALID."""

    attempt_id: int
    message: str


Command = (
    Submit
    | Cancel
    | CancelOrigin
    | RemoteReadable
    | RemoteLoaded
    | RemoteFinished
    | RemoteLost
    | DestinationSafe
    | HoldEnded
    | ResetPrefixCache
    | GrammarReady
    | GrammarFailed
)
