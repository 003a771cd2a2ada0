import pytest

from twinpool.engine.ngram import NgramProposer
from twinpool.engine.speculation import AdaptiveProposer, SpeculationController, SpeculationSettings

from .helpers import make_request


def run(
    controller: SpeculationController, batch: int, steps: int, plain_s: float, draft_s: float, accepted: float
) -> list[bool]:
    """Decisions over ``steps`` steps; ``accepted`` tokens per request whenever drafts are made."""
    decisions = []
    for _ in range(steps):
        drafting = controller.should_draft(batch)
        decisions.append(drafting)
        if drafting:
            controller.observe(batch, num_drafts=4 * batch, num_accepted=int(accepted * batch), seconds=draft_s)
        else:
            controller.observe(batch, 0, 0, plain_s)
    return decisions


def test_stays_on_while_it_pays_and_times_a_plain_step_now_and_then() -> None:
    controller = SpeculationController()
    decisions = run(controller, 4, 500, plain_s=0.020, draft_s=0.024, accepted=2.0)
    assert decisions[0]
    assert 3 <= decisions.count(False) <= 12
    assert controller.gain(4) == pytest.approx(3 * 20 / 24)


def test_switches_off_where_it_does_not_pay_and_keeps_probing() -> None:
    controller = SpeculationController()
    decisions = run(controller, 64, 1000, plain_s=0.020, draft_s=0.080, accepted=0.5)
    assert decisions[0]
    drafted = decisions[20:].count(True)
    assert 0 < drafted < 100
    assert controller.gain(64) == pytest.approx(1.5 * 20 / 80)


def test_batch_sizes_learn_apart() -> None:
    controller = SpeculationController()
    run(controller, 64, 100, plain_s=0.020, draft_s=0.080, accepted=0.5)
    run(controller, 2, 100, plain_s=0.020, draft_s=0.021, accepted=2)
    assert not controller.should_draft(64)
    assert controller.should_draft(2)
    assert controller.should_draft(3)  # same bucket
    assert controller.gain(16) is None


def test_comes_back_when_acceptance_improves_and_goes_when_it_falls() -> None:
    controller = SpeculationController()
    run(controller, 8, 200, 0.020, 0.026, accepted=0)
    assert sum(run(controller, 8, 50, 0.020, 0.026, accepted=0)) < 10
    run(controller, 8, 1000, 0.020, 0.026, accepted=2)
    assert sum(run(controller, 8, 100, 0.020, 0.026, accepted=2)) > 90
    run(controller, 8, 300, 0.020, 0.026, accepted=0)
    assert sum(run(controller, 8, 100, 0.020, 0.026, accepted=0)) < 20


def test_gain_within_the_margin_does_not_switch_on() -> None:
    controller = SpeculationController(SpeculationSettings(margin=0.1))
    run(controller, 4, 100, 0.010, 0.040, accepted=1)
    assert not controller.should_draft(4)
    run(controller, 4, 2000, 0.010, 0.019, accepted=1)
    assert controller.gain(4) == pytest.approx(20 / 19, rel=0.01)
    assert sum(run(controller, 4, 100, 0.010, 0.019, accepted=1)) < 20


def test_same_observations_same_decisions() -> None:
    first, second = (run(SpeculationController(), 16, 300, 0.02, 0.03, accepted=0.6) for _ in range(2))
    assert first == second


def search(controller: SpeculationController, batch: int, steps: int) -> list[bool]:
    """Whether each of ``steps`` steps searched; none finds anything."""
    searched = []
    for _ in range(steps):
        searched.append(controller.should_draft(batch))
        controller.observe(batch, 0, 0, 0.02)
    return searched


def test_searches_that_find_nothing_become_rare_and_never_end() -> None:
    """Neither rewarded nor punished: what counts is how often nothing was found in a row, per batch size."""
    controller = SpeculationController()
    searched = search(controller, 4, 2000)
    assert all(searched[:8])
    assert sum(searched[8:100]) <= 10
    assert 1 <= sum(searched[200:265]) <= 3
    assert sum(searched[-650:]) >= 10
    assert controller.gain(4) is None
    assert controller.should_draft(32)


def test_a_draft_found_ends_the_pauses() -> None:
    controller = SpeculationController()
    search(controller, 4, 500)
    while not controller.should_draft(4):
        controller.observe(4, 0, 0, 0.02)
    controller.observe(4, 8, 8, 0.021)
    assert sum(run(controller, 4, 100, 0.02, 0.021, accepted=2)) > 90


def test_searches_become_rare_while_drafts_do_not_pay_either() -> None:
    """A probe that waits for a draft does not keep the search on."""
    controller = SpeculationController()
    run(controller, 4, 200, plain_s=0.020, draft_s=0.080, accepted=0.5)
    assert sum(search(controller, 4, 1000)) < 40


def test_adaptive_proposer_drafts_only_while_it_pays() -> None:
    controller = SpeculationController()
    proposer = AdaptiveProposer(NgramProposer(2, 3, 4), controller)
    request = make_request(prompt=[1, 2, 3, 4, 2, 3])
    proposer.begin_step(1)
    assert proposer.propose(request) == [4, 2, 3]
    for _ in range(40):
        proposer.begin_step(1)
        drafts = proposer.propose(request)
        proposer.end_step(1, len(drafts), 0, 0.05 if drafts else 0.02)
    proposer.begin_step(1)
    assert proposer.propose(request) == []
    proposer.begin_step(0)
    assert proposer.propose(request) == []
