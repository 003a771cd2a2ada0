"""Pipelines keep one batch per stage in flight, of requests apart, and say what one rank says, whatever happens.

Ranks other than 0 are real processes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from processes import children

from options import BLOCK, JSON, OPTIONS, Truth, check, outputs_of, prompt_of
from pair import Answer, Ask, Grammars, Oracle, Pair, Pool, pair
from twinpool.engine.plan import OnLayers, ScheduledRequest, StepPlan, StepResult
from twinpool.engine.request import Request, SamplingParams, StopParams
from twinpool.engine.speculation import SteadyProposer

SHAPES = {"PP2": (1, 2), "PP2xTP2": (2, 2)}
NAMES = ("greedy", "seeded", "penalties", "logprobs", "n", "json")
LENGTHS = (5, 9)
LONG = StopParams(30, ignore_eos=True)


@pytest.fixture(scope="module", params=SHAPES)
def pool(request: pytest.FixtureRequest, tiny_llama: Path) -> Iterator[Pool]:
    made = Pool.load(tiny_llama, BLOCK, 60, *SHAPES[request.param])
    yield made
    made.close()


@pytest.fixture(scope="module")
def alone(tiny_llama: Path) -> Iterator[Pool]:
    made = Pool.load(tiny_llama, BLOCK, 200)
    yield made
    made.close()


@pytest.fixture(scope="module")
def grammars(tiny_llama: Path, alone: Pool) -> Iterator[Mapping[str, Grammars]]:
    config = alone.built.config
    both = {role: Grammars(tiny_llama / "tokenizer.json", config.vocab_size, config.eos_ids) for role in ("decode",)}
    yield both
    for item in both.values():
        assert len(item) == 0, "a matcher was not released"
        item.close()


@pytest.fixture(scope="module")
def asks() -> dict[tuple[str, int], Ask]:
    asks = {}
    for length in LENGTHS:
        for name in NAMES:
            option = OPTIONS[name] | ({} if OPTIONS[name].get("constraint") == JSON else {"stop": LONG})
            asks[name, length] = Ask(prompt_of(length), salt=name, **option)
    return asks


@pytest.fixture(scope="module")
def truth(alone: Pool, grammars: Mapping[str, Grammars], asks: Mapping[tuple[str, int], Ask]) -> Truth:
    found: dict[tuple[str, int], list[Answer]] = {}
    with pair(alone, grammars=grammars, caching=False) as engine:
        for key, ask in asks.items():
            [found[key]] = engine.serve([ask])
    return found


@dataclass
class Traffic:
    """What an executor had in flight; ``overlapped`` counts launches behind another step."""

    flights: list[set[Request]] = field(default_factory=list)
    overlapped: int = 0
    sizes: list[int] = field(default_factory=list)


@pytest.fixture
def traffic(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> Traffic:
    executor, seen = pool.built.executor, Traffic()
    launch, collect = executor.launch, executor.collect

    def watched_launch(plan: StepPlan, layer_groups: int, on_layers: OnLayers | None) -> None:
        members = {entry.request for entry in plan.scheduled}
        assert not any(members & other for other in seen.flights), "a request is in two steps"
        seen.overlapped += bool(seen.flights)
        seen.sizes.append(len(members))
        seen.flights.append(members)
        launch(plan, layer_groups, on_layers)

    def watched_collect() -> StepResult:
        seen.flights.pop(0)
        return collect()

    monkeypatch.setattr(executor, "launch", watched_launch)
    monkeypatch.setattr(executor, "collect", watched_collect)
    return seen


def test_the_first_stage_goes_on_while_the_last_one_stands_still(pool: Pool) -> None:
    """With the last stage's ranks stopped, two steps pass the first stage; they end once the ranks go on."""
    executor, tp_size = pool.built.executor, pool.built.shard.parallel.tp_size
    written: list[tuple[int, int]] = []
    requests = [
        Request(i, prompt_of(9), SamplingParams(temperature=0), StopParams(4), block_ids=[4 * i, 4 * i + 1, 4 * i + 2])
        for i in (1, 2)
    ]
    plans = [StepPlan(i, [ScheduledRequest(request, 9, True)]) for i, request in enumerate(requests, 1)]
    last_stage = sorted(children(os.getpid()))[-tp_size:]
    for rank in last_stage:
        os.kill(rank, signal.SIGSTOP)
    try:
        for plan in plans:
            executor.launch(plan, 2, lambda rank, start, end, event, step=plan.step: written.append((step, rank)))
        assert {(1, 0), (2, 0)} <= set(written)
        assert all(rank < tp_size for _, rank in written)
    finally:
        for rank in last_stage:
            os.kill(rank, signal.SIGCONT)
    first = executor.collect().sampled[0].token_ids
    assert (1, tp_size) in written
    assert executor.collect().sampled[0].token_ids == first
    assert sorted(written) == [(step, rank) for step in (1, 2) for rank in range(2 * tp_size)]


@pytest.mark.parametrize("speculate", [False, True])
def test_batches_in_flight_change_nothing(
    pool: Pool,
    traffic: Traffic,
    grammars: Mapping[str, Grammars],
    asks: Mapping[tuple[str, int], Ask],
    truth: Truth,
    speculate: bool,
) -> None:
    """All options at once, some cancelled at odd moments, in a pool so small that it preempts."""
    speculation = SteadyProposer(Oracle(outputs_of(truth))) if speculate else None
    with pair(pool, grammars=grammars, speculation=speculation, chunk=4) as engine:
        attempts = {key: engine.ask(ask) for key, ask in asks.items()}
        doomed = [engine.ask(replace(ask, salt="doomed")) for ask in list(asks.values())[:6]]
        for attempt in doomed:
            engine.turn()
            engine.turn()
            engine.cancel(attempt)
        engine.drain()
        for key, attempt in attempts.items():
            check(engine.answers(attempt), truth[key], key[0])
        assert engine.decode.load().preemptions > 3
    assert traffic.overlapped > 20
    assert traffic.flights == []


def test_generating_requests_are_shared_out_evenly(pool: Pool, traffic: Traffic) -> None:
    with pair(pool, caching=False) as engine:
        greedy = [Ask(prompt_of(5), stop=StopParams(20, ignore_eos=True)) for _ in range(7)]
        engine.serve(greedy)
    assert {3, 4} == set(traffic.sizes[4:-4])


def test_an_engine_that_ends_with_steps_in_flight_harms_nobody(tiny_llama: Path) -> None:
    before = set(children(os.getpid()))
    made = Pool.load(tiny_llama, BLOCK, 60, 1, 2)
    engine = Pair(made)
    for length in (3, 4):
        engine.ask(Ask(prompt_of(length)))
    engine.turn()
    assert len(engine.decode._flights) == 1
    engine.close()
    made.close()
    assert set(children(os.getpid())) == before
