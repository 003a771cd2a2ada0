"""What is learned from measurements, how soon, and how it is forgotten."""

from __future__ import annotations

import random

import pytest

from twinpool.router.backlog import Backlog
from twinpool.router.costs import EqualCosts
from twinpool.router.learner import Learner
from twinpool.router.line_fit import HALF_LIFE_S, LineFit, measured

A, B, C = ("prefill-0", 1), ("prefill-1", 1), ("prefill-2", 1)
PRIOR = EqualCosts()


def test_a_line_is_found_again() -> None:
    draw, fit = random.Random(3), LineFit()
    for number in range(60):
        units = draw.choice((16, 200, 2000))
        fit.add(measured(units, (0.02 + 0.001 * units) * draw.uniform(0.9, 1.1), 64.0), number * 0.1)
    line = fit.sums(6.0).line()
    assert line.fixed_s == pytest.approx(0.02, rel=0.3)
    assert line.per_unit_s == pytest.approx(0.001, rel=0.1)


def test_neither_part_becomes_negative() -> None:
    for points in ([(10, 1.0), (1000, 0.1)], [(10, 0.0), (1000, 10.0)], [(0, 0.5)], [(500, 0.0)]):
        fit = LineFit()
        for units, seconds in points:
            fit.add(measured(units, seconds, 64.0), 0.0)
        line = fit.sums(0.0).line()
        assert line.fixed_s >= 0
        assert line.per_unit_s >= 0


def test_priors_then_peers_then_the_worker_itself() -> None:
    learner = Learner()
    costs = learner.costs(0.0)
    assert costs.prefill(A).at(500) == pytest.approx(PRIOR.prefill_line.at(500))
    assert costs.handover(A, B).at(500) == pytest.approx(PRIOR.handover_line.at(500))
    for _ in range(3):
        learner.first_token(A, 1000, 4.0, 1.0)
    costs = learner.costs(2.0)
    assert costs.prefill(A).at(1000) == pytest.approx(4.0, rel=0.1)
    assert costs.prefill(B).at(1000) == pytest.approx(4.0, rel=0.2)  # like its peer
    for _ in range(3):
        learner.first_token(B, 1000, 1.0, 2.0)
    costs = learner.costs(4.0)
    assert costs.prefill(B).at(1000) == pytest.approx(1.0, rel=0.25)
    assert costs.prefill(A).at(1000) == pytest.approx(4.0, rel=0.1)


@pytest.mark.parametrize("factor", [0.03, 30.0], ids=["faster than the priors", "slower"])
def test_a_new_worker_is_taken_to_be_as_fast_as_its_peers(factor: float) -> None:
    learner = Learner()
    for number in range(40):
        streams, tokens = number % 4, 16 + 200 * (number % 3)
        learner.answered(A, streams, 101, 100 * factor * PRIOR.pace_line.at(streams + 1), number)
        learner.first_token(A, tokens, factor * PRIOR.prefill_line.at(tokens), number)
    costs = learner.costs(41.0)
    for streams in (1, 4):
        assert costs.pace(B).at(streams) == pytest.approx(costs.pace(A).at(streams), rel=0.02)
    for tokens in (16, 400):
        assert costs.prefill(B).at(tokens) == pytest.approx(costs.prefill(A).at(tokens), rel=0.02)


def test_one_bad_measurement_is_forgotten_by_use_and_by_time() -> None:
    learner = Learner()
    learner.first_token(A, 100, 30.0, 0.0)
    for number in range(20):
        learner.first_token(B, 100, 0.1, 1.0 + number)
    assert learner.costs(30.0).prefill(A).at(100) > 5.0
    late = 30.0 + 8 * HALF_LIFE_S
    for number in range(20):
        learner.first_token(B, 100, 0.1, late + number)
    assert learner.costs(late + 21).prefill(A).at(100) < 0.5
    for _ in range(40):
        learner.first_token(A, 100, 0.1, late + 21)
    assert learner.costs(late + 23).prefill(A).at(100) == pytest.approx(0.1, rel=0.2)


def test_a_pause_is_not_a_pace_but_a_slow_worker_is_found_out() -> None:
    learner = Learner()
    for _ in range(10):
        learner.first_token(A, 1000, 1.0, 1.0)
    learner.first_token(A, 1000, 60.0, 1.0)
    assert learner.costs(1.0).prefill(A).at(1000) < 1.5
    for _ in range(10):
        learner.first_token(A, 1000, 10.0, 1.0)
    assert learner.costs(1.0).prefill(A).at(1000) > 5.0


def test_a_backlog_speaks_for_the_time_since_the_report() -> None:
    backlog = Backlog()
    backlog.sent(1, 1, 500, 600)
    backlog.sent(2, 2, 0, 300)
    assert (backlog.requests, backlog.tokens, backlog.kv_tokens) == (3, 500, 900)
    backlog.computed(1)
    backlog.computed(1)
    backlog.ended(2)
    backlog.ended(2)
    assert (backlog.requests, backlog.tokens) == (1, 0)
    backlog.sent(3, 1, 70, 80)
    backlog.reported()
    assert (backlog.requests, backlog.tokens, backlog.kv_tokens) == (0, 0, 0)
    backlog.computed(3)  # the report still counted it
    assert backlog.tokens == -70
