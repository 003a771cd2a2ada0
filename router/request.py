"""A request after validation: every default filled in, every token id in range, nothing left to interpret."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.router.messages import Constraint, Sampling, Stopping


@dataclass(frozen=True, slots=True)
class ResolvedRequest:
    """What a flow serves.

    ``stopping.max_tokens`` is what was asked for, cut to what the context leaves. ``want_token_ids`` and the logprob
    counts say what responses carry; None means none.
    """

    request_id: str
    model: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    n: int
    stopping: Stopping
    constraint: Constraint | None = None
    want_token_ids: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    priority: int = 0
    session_id: str = ""
    cache_salt: str = ""
    traceparent: str = ""
    """W3C trace context of the client."""
