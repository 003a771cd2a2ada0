"""Pools too small for what runs: requests queue, are preempted and recomputed, and say the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from options import BLOCK, JSON, OPTIONS, Truth, asks_of, check, outputs_of, prompt_of, with_stops
from pair import Answer, Ask, Grammars, Oracle, pair
from twinpool.engine.request import StopParams
from twinpool.engine.speculation import SteadyProposer

LENGTHS = (5, 8)
LONG = StopParams(50, ignore_eos=True)


@pytest.fixture(scope="module")
def asks() -> dict[tuple[str, int], Ask]:
    """Answers so long that what was admitted does not fit any more later."""
    asks = {}
    for length in LENGTHS:
        for name in ("greedy", "seeded", "penalties", "logprobs", "n", "json"):
            option = OPTIONS[name] | ({} if OPTIONS[name].get("constraint") == JSON else {"stop": LONG})
            ask = Ask(prompt_of(length), salt=name, **option)
            asks[name, length] = replace(ask, sampling=replace(ask.sampling, prompt_logprobs=None))
    return asks


@pytest.fixture(scope="module")
def answers_wanted(pool: Any, grammars: Any, asks: Mapping[tuple[str, int], Ask]) -> Truth:
    found: dict[tuple[str, int], list[Answer]] = {}
    with pair(pool(BLOCK, 400, "decode"), grammars=grammars, caching=False) as alone:
        for key, ask in asks.items():
            [found[key]] = alone.serve([ask])
    return found


@pytest.mark.parametrize("speculate", [False, True])
@pytest.mark.parametrize("chunk", [512, 3])
@pytest.mark.parametrize("blocks", [18, 40])
@pytest.mark.parametrize("remote", [False, True])
def test_preemption_changes_nothing(
    pool: Any,
    grammars: Mapping[str, Grammars],
    asks: Mapping[tuple[str, int], Ask],
    answers_wanted: Truth,
    remote: bool,
    blocks: int,
    chunk: int,
    speculate: bool,
) -> None:
    speculation = SteadyProposer(Oracle(outputs_of(answers_wanted))) if speculate else None
    prefill = pool(BLOCK, 18, "small prefill") if remote else None
    decode = pool(BLOCK, blocks, f"small decode {blocks}")
    with pair(decode, prefill, grammars=grammars, speculation=speculation, chunk=chunk) as deployment:
        attempts = {key: deployment.ask(ask) for key, ask in asks.items()}
        deployment.drain()
        for key, attempt in attempts.items():
            check(deployment.answers(attempt), answers_wanted[key], key[0])
        assert deployment.decode.load().preemptions > 3
        assert any(stats.preemptions for stats in deployment.decode_sink.stats.values())


@pytest.mark.parametrize("limits", [{"max_num_seqs": 2}, {"max_num_batched_tokens": 64}, {"max_num_seqs": 5}])
def test_small_batches_change_nothing(pool: Any, grammars: Any, truth: Truth, limits: dict[str, int]) -> None:
    with pair(pool(BLOCK, 400, "decode"), pool(BLOCK, 12, "tiny prefill"), grammars=grammars, **limits) as deployment:
        asked = with_stops(asks_of(9), truth, 9)
        answers = deployment.serve(list(asked.values()))
        for name, choices in zip(asked, answers, strict=True):
            check(choices, truth[name, 9], name)
