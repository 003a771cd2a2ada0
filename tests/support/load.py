"""Requests for tests that disturb a deployment: many kinds, and answers that can be compared."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from twinpool import AsyncClient
from twinpool.results import Completion

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 7},
    "penalties": {
        "temperature": 0.8,
        "seed": 3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
    },
    "logprobs": {"temperature": 0.0, "logprobs": 3},
    "two choices": {"temperature": 1.0, "seed": 11, "n": 2},
    "json": {
        "temperature": 1.0,
        "seed": 5,
        "json_schema": '{"type": "array", "items": {"type": "integer"}, "minItems": 40, "maxItems": 60}',
    },
}

STREAM_KINDS = [*KINDS, *KINDS]


def prompt(seed: int, length: int) -> list[int]:
    """Token ids that share no block with those of another seed."""
    return [(7 * seed + 13 * i + i * i * (seed % 5 + 1)) % 240 + 1 for i in range(length)]


def check_same(got: Completion, wanted: Completion) -> None:
    """The same tokens, texts, ends and log probabilities, choice by choice."""
    for mine, theirs in zip(got.choices, wanted.choices, strict=True):
        assert list(mine.token_ids) == list(theirs.token_ids)
        assert mine.text == theirs.text
        assert mine.finish_reason == theirs.finish_reason
        assert [item.token_id for item in mine.logprobs] == [item.token_id for item in theirs.logprobs]
        for a, b in zip(mine.logprobs, theirs.logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-3)
    assert got.usage.completion_tokens == wanted.usage.completion_tokens


async def stream(
    client: AsyncClient,
    prompt_ids: Sequence[int],
    after: int = 0,
    then: Callable[[], Awaitable[None]] | None = None,
    **options: Any,
) -> Completion:
    """Streams an answer; once ``after`` tokens of it have come, awaits ``then`` (once)."""
    seen = 0
    async with client.stream(prompt_ids, **options) as answer:
        async for chunk in answer:
            seen += len(chunk.token_ids)
            if then is not None and seen >= after:
                action, then = then, None
                await action()
    return answer.result


FLOOD = 4


def flood(client: AsyncClient, prompts: Sequence[list[int]], **options: Any) -> list[asyncio.Task[Completion]]:
    """``FLOOD`` requests for each prompt, none cached: prefill workers stay at it until one of them is disturbed.

    Answers come in the order of ``[*prompts] * FLOOD``.
    """
    salts = [f"flood {number}" for number in range(FLOOD)]
    return [asyncio.create_task(client.generate(ids, cache_salt=salt, **options)) for salt in salts for ids in prompts]


async def all_kinds(client: AsyncClient, max_tokens: int, **first: Any) -> list[Completion]:
    """Ten streams at once, each kind twice; ``first`` are arguments of the first one (when to act, and how)."""

    def one(number: int, kind: str) -> Awaitable[Completion]:
        extra = first if number == 0 else {}
        ids = prompt(number, 40 + 37 * number)
        return stream(client, ids, max_tokens=max_tokens, ignore_eos=True, **KINDS[kind], **extra)

    return await asyncio.gather(*(one(number, kind) for number, kind in enumerate(STREAM_KINDS)))


def check_all_same(got: Sequence[Completion], wanted: Sequence[Completion]) -> None:
    """``check_same`` for each pair."""
    for mine, theirs in zip(got, wanted, strict=True):
        check_same(mine, theirs)
