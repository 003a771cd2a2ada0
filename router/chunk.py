"""A piece of an answer, as a flow hands it to the gRPC and HTTP surfaces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twinpool.router.messages import FinishReason, TokenLogprob
from twinpool.router.summary import Summary


@dataclass(frozen=True, slots=True)
class Chunk:
    """New content of one choice; ``summary`` is set in the last chunk of the request."""

    index: int
    text: str
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprob] = ()
    prompt_logprobs: Sequence[TokenLogprob] = ()
    prompt_token_ids: Sequence[int] = ()
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    summary: Summary | None = None
