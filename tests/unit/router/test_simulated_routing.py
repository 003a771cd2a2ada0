"""The real policy, learner and prefix indexes over simulated workers: what they achieve, not what they decide once."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import replace

import pytest
from router_simulator import Ask, Simulator, Speed, mean_ttft, perfect_tokens

from twinpool.router.policy import Mode, Route, RouteQuery, choose

Tokens = list[int]


def draw_tokens(draw: random.Random, count: int) -> Tokens:
    return [draw.randrange(50_000) for _ in range(count)]


def conversations(count: int, turns: int, per_s: float, seed: int = 1) -> list[list[Ask]]:
    """Multi-turn chats that share a system prompt of 320 tokens; a turn holds all before it."""
    draw, found, at = random.Random(seed), [], 0.0
    system = draw_tokens(draw, 320)
    for _ in range(count):
        at += draw.expovariate(per_s)
        history, chat = list(system), []
        for turn in range(turns):
            history = history + draw_tokens(draw, draw.randrange(30, 200))
            answer = draw_tokens(draw, draw.randrange(16, 48))
            chat.append(Ask(draw.uniform(0.1, 3.0) if turn else at, history, answer))
            history = history + answer
        found.append(chat)
    return found


def mix(count: int, per_s: float, seed: int = 2) -> list[list[Ask]]:
    """Prompts of 16 and of 2,000 tokens, half and half, that share nothing."""
    draw, found, at = random.Random(seed), [], 0.0
    for _ in range(count):
        at += draw.expovariate(per_s)
        found.append([Ask(at, draw_tokens(draw, draw.choice((16, 2000))), [1] * 32)])
    return found


def in_turn(sim: Simulator, query: RouteQuery) -> Route:
    """The same policy, but prefill workers take turns and caches are unknown."""
    other = ("prefill-0", "prefill-1")[sim.routes.total() % 2]
    route = choose(replace(query, barred=frozenset({(other, 1)})), sim.views(), sim.routing.learner.costs(sim.now))
    assert isinstance(route, Route)
    return route


def ratio(sim: Simulator, asks: Sequence[Ask]) -> float:
    return sum(ask.computed for ask in asks) / perfect_tokens(asks)


def test_affinity_is_close_to_a_perfect_router() -> None:
    sim = Simulator(2, 2)
    assert ratio(sim, sim.run(conversations(24, 5, 2.0))) <= 1.15
    blind = Simulator(2, 2, spread=in_turn)
    assert ratio(blind, blind.run(conversations(24, 5, 2.0))) > 1.3


def test_affinity_yields_to_load() -> None:
    """One hot prefix: its worker does not drown, and the other one learns the prefix too."""
    draw = random.Random(4)
    hot, at, asks = draw_tokens(draw, 1600), 0.0, []
    for _ in range(200):
        at += draw.expovariate(6.0)
        asks.append([Ask(at, hot + draw_tokens(draw, 200), [1] * 8)])
    sim = Simulator(2, 2)
    served = sim.run(asks)
    work = [worker.computed for worker in sim.workers[:2]]
    assert max(work) < 2 * min(work)
    assert ratio(sim, served) < 1.25  # those that come while the prefix is computed for the first time miss it
    assert mean_ttft(served[20:]) < 2.0  # alone, a worker would be loaded with 1.2 times what it can do


def test_faster_workers_get_more() -> None:
    asks = [[ask] for [ask] in mix(200, 1.2)]
    sim = Simulator(2, 1, speeds={"prefill-1": Speed(token_s=0.003)})
    sim.run(asks)
    fast, slow = (worker.computed for worker in sim.workers[:2])
    assert 1.5 < fast / slow < 8


@pytest.mark.parametrize("per_s", [0.2, 0.5, 1.0])
def test_auto_beats_always_local_and_always_remote(per_s: float) -> None:
    def served(mode: Mode) -> list[Ask]:
        return Simulator(mode=mode).run(mix(120, per_s))

    auto, always, never = served("auto"), served("always"), served("never")
    assert mean_ttft(auto) <= min(mean_ttft(always), mean_ttft(never))
    assert statistics.fmean(ask.pace for ask in auto) < statistics.fmean(ask.pace for ask in never)


def choices(sim: Simulator, lengths: Sequence[int]) -> list[str]:
    """Where prompts go that come one after the other, each to idle workers."""
    draw = random.Random(5)
    asks = [Ask(0.5, draw_tokens(draw, length), [1] * 4) for length in lengths]
    sim.run([asks])
    return ["local" if ask.route is not None and ask.route.prefill is None else "remote" for ask in asks]


def test_the_break_even_is_learned_in_a_few_requests_and_stays() -> None:
    lengths = [16, 2000] * 15
    quick = choices(Simulator(mode="auto", speed=Speed(handover_s=0.02)), lengths)
    assert quick[4:] == ["local", "remote"] * 13
    far = choices(Simulator(mode="auto", speed=Speed(handover_s=3.0)), lengths)
    assert far[4:] == ["local"] * 26
    weak = {"decode-0": Speed(token_s=0.02)}
    assert choices(Simulator(mode="auto", speeds=weak), [2000] * 20)[3:] == ["remote"] * 17


def test_a_prompt_that_decode_has_cached_stays_there() -> None:
    draw = random.Random(6)
    history = draw_tokens(draw, 2000)
    answer = draw_tokens(draw, 32)
    turns = [Ask(0.0, history, answer), Ask(1.0, history + answer + draw_tokens(draw, 20), [1] * 4)]
    first, second = Simulator(mode="auto").run([turns])
    assert first.route is not None
    assert second.route is not None
    assert (first.route.prefill, second.route.prefill) == (("prefill-0", 1), None)
    assert second.computed < 60
