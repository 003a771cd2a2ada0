"""What an engine refuses before it queues a request: each refusal names the field, the value and the remedy.

A request that passes cannot fail the step it is computed in: token ids index the vocabulary, limits leave room, and
sampling parameters have a distribution. Routers check the same earlier, for most of it; a worker trusts none of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from twinpool.engine.engine_config import EngineConfig
from twinpool.engine.request import Request, SamplingParams

Problem = tuple[str, str]
"""Field and message."""


def problem(request: Request, config: EngineConfig, max_model_len: int, has_grammars: bool) -> Problem | None:
    """Why ``request`` can never be served here, or None. ``max_model_len`` is what blocks and model allow."""
    return (
        _lengths(request, config, max_model_len)
        or _ids(request, config.vocab_size)
        or _sampling(request.sampling)
        or _constraint(request, has_grammars)
    )


def _lengths(request: Request, config: EngineConfig, max_model_len: int) -> Problem | None:
    given = len(request.output_ids)
    if not request.prompt_ids:
        return "prompt", "the prompt is empty; send one token or more"
    if request.num_tokens >= max_model_len:
        return "prompt", (
            f"{request.num_tokens} prompt and output tokens leave no room for an answer: this worker holds "
            f"{max_model_len} tokens per request (the configured limit is {config.max_model_len}, the rest depends on "
            f"its KV blocks of {config.block_size} tokens)"
        )
    if request.stop.max_tokens <= given:
        return "max_tokens", f"max_tokens is {request.stop.max_tokens}, but {given} tokens are there already"
    if request.stop.min_tokens > request.stop.max_tokens:
        return "min_tokens", f"min_tokens is {request.stop.min_tokens}, more than max_tokens {request.stop.max_tokens}"
    n = request.sampling.n
    if n < 1 or (n > 1 and given):
        return "n", f"n is {n}; it must be positive, and 1 where output tokens are given"
    return None


def _ids(request: Request, vocab_size: int) -> Problem | None:
    fields: tuple[tuple[str, Iterable[int]], ...] = (
        ("prompt", request.prompt_ids),
        ("output_ids", request.output_ids),
        ("stop_token_ids", request.stop.stop_token_ids),
        ("logit_bias", request.sampling.logit_bias),
    )
    for field, ids in fields:
        bad = next((token_id for token_id in ids if not 0 <= token_id < vocab_size), None)
        if bad is not None:
            return field, f"token id {bad} is outside the vocabulary of {vocab_size}"
    return None


def _sampling(sampling: SamplingParams) -> Problem | None:
    penalties = (sampling.presence_penalty, sampling.frequency_penalty)
    checks = (
        ("temperature", sampling.temperature, sampling.temperature >= 0, "at least 0"),
        ("top_p", sampling.top_p, 0 < sampling.top_p <= 1, "in (0, 1]"),
        ("top_k", sampling.top_k, sampling.top_k >= 0, "at least 0"),
        ("min_p", sampling.min_p, 0 <= sampling.min_p <= 1, "in [0, 1]"),
        ("presence_penalty", penalties[0], True, "finite"),
        ("frequency_penalty", penalties[1], True, "finite"),
        ("repetition_penalty", sampling.repetition_penalty, sampling.repetition_penalty > 0, "positive"),
        ("logprobs", sampling.logprobs or 0, (sampling.logprobs or 0) >= 0, "at least 0"),
        ("prompt_logprobs", sampling.prompt_logprobs or 0, (sampling.prompt_logprobs or 0) >= 0, "at least 0"),
    )
    for field, value, good, wanted in checks:
        if not (good and math.isfinite(value)):
            return field, f"{field} is {value:g}; it must be {wanted}"
    for token_id, bias in sampling.logit_bias.items():
        if not math.isfinite(bias):
            return "logit_bias", f"the bias of token {token_id} is {bias:g}; it must be finite"
    return None


def _constraint(request: Request, has_grammars: bool) -> Problem | None:
    if request.constraint is not None and not has_grammars:
        return "structured_output", "this engine has no grammar support; send the request without a constraint"
    return None
