"""A worker is lost after any number of tokens: another continues from prompt and output, and says exactly the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from options import BLOCK, OPTIONS, Truth, asks_of, check, outputs_of, with_stops
from pair import Answer, Ask, Grammars, Oracle, pair
from twinpool.engine.speculation import SteadyProposer


def continuations(ask: Ask, choices: list[Answer]) -> Iterator[tuple[Ask, Answer]]:
    """One per choice and cut: what a router dispatches, and what is left to say."""
    for choice, whole in enumerate(choices):
        for cut in range(1, len(whole.tokens)):
            rest = replace(whole, tokens=whole.tokens[cut:], logprobs=whole.logprobs[cut:])
            yield (
                replace(ask, sampling=replace(ask.sampling, n=1), choice=choice, output=tuple(whole.tokens[:cut])),
                rest,
            )


@pytest.mark.parametrize("speculate", [False, True])
@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("name", [*OPTIONS, "stop ids"])
def test_any_cut_continues_exactly(
    pool: Any, grammars: Mapping[str, Grammars], truth: Truth, name: str, remote: bool, speculate: bool
) -> None:
    """Scenario 24, for every option: the grammar, penalties, limits and sampling index go on where they were."""
    speculation = SteadyProposer(Oracle(outputs_of(truth))) if speculate else None
    prefill = pool(BLOCK, 400, "prefill") if remote else None
    with pair(pool(BLOCK, 400, "decode"), prefill, grammars=grammars, speculation=speculation) as deployment:
        parts = [
            part
            for length in (4, 5, 12)
            for part in continuations(with_stops(asks_of(length), truth, length)[name], truth[name, length])
        ]
        assert parts or name == "max 1"
        attempts = [deployment.ask(part) for part, _ in parts]
        deployment.drain()
        for attempt, (_, rest) in zip(attempts, parts, strict=True):
            check(deployment.answers(attempt), [rest], name)
