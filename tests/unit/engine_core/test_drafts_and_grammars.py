"""The seams for speculation and structured output, with scripted implementations."""

import random

import pytest
import torch

from twinpool.engine.commands import Cancel, GrammarFailed, GrammarReady, HoldEnded
from twinpool.engine.ports import GrammarError
from twinpool.engine.request import Constraint, FailureCode, FinishReason
from twinpool.engine.speculation import AdaptiveProposer, SpeculationController, SteadyProposer


class Oracle:
    """Knows the future; spoils a share of it."""

    def __init__(self, reference, k, wrong, seed=3):
        self.reference, self.k, self.wrong = reference, k, wrong
        self.rng = random.Random(seed)

    def propose(self, request):
        assert request.is_decoding
        known = len(request.output_ids)
        future = self.reference(request.prompt_ids, known + self.k, request.choice, eos=-1)[0][known:]
        return [t + 1 if self.rng.random() < self.wrong else t for t in future]


def steady(*args):
    return SteadyProposer(Oracle(*args))


@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("limits", [{}, {"num_blocks": 16}, {"max_num_batched_tokens": 16}])
def test_drafts_change_nothing_but_the_number_of_steps(harness, wrong, limits):
    h = harness(speculation=steady(harness.reference, 4, wrong), **limits)
    prompts = {a: [a, *range(100, 105)] for a in range(1, 5)}
    for attempt, prompt in prompts.items():
        h.submit(attempt, prompt, max_tokens=21)
    h.drain()
    for attempt, prompt in prompts.items():
        assert h.output(attempt) == h.reference(prompt, 21)[0]
        stats = h.sink.outputs[attempt, 0][-1].stats
        assert (stats.accepted_tokens == 0) == (wrong == 1.0)
        assert wrong > 0 or stats.accepted_tokens == stats.draft_tokens
    if not limits:
        assert len(h.executor.plans) == {0.0: 5, 1.0: 21}.get(wrong, len(h.executor.plans))
    h.assert_empty()


def test_stop_token_inside_an_accepted_draft_drops_the_rest(harness):
    prompt = list(range(30, 36))
    whole = harness.reference(prompt, 12)[0]
    h = harness(speculation=steady(harness.reference, 8, 0.0))
    h.submit(1, prompt, max_tokens=12, stop_token_ids=frozenset({whole[4]}))
    h.drain()
    assert h.output(1) == whole[:5]
    assert h.sink.outputs[1, 0][-1].stop_token_id == whole[4]
    h.assert_empty()


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 6, 7])
def test_drafts_never_exceed_max_tokens_or_the_model(harness, max_tokens):
    h = harness(speculation=steady(harness.reference, 4, 0.0), max_model_len=12)
    h.submit(1, list(range(6)), max_tokens=max_tokens)
    h.drain()
    assert h.output(1) == h.reference(list(range(6)), max_tokens, max_model_len=12)[0]
    h.assert_empty()


class Grammars:
    """``complete`` and ``refused`` say at which number of output tokens a constraint is satisfied or fails."""

    def __init__(self, complete=None, refused=None, no_rows=None):
        self.post = {}
        self.live = {}
        self.complete, self.refused, self.no_rows = complete, refused, no_rows

    def compile(self, request, post):
        self.post[request.attempt_id] = post
        self.live[request.attempt_id, request.choice] = list(request.output_ids)

    def fork(self, source, target):
        self.live[target.attempt_id, target.choice] = list(self.live[source.attempt_id, source.choice])

    def rows(self, request, draft_ids):
        assert self.live[request.attempt_id, request.choice] == request.output_ids
        if self.no_rows is not None and len(request.output_ids) >= self.no_rows:
            raise GrammarError("too many states")
        return torch.zeros(1 + len(draft_ids), 2, dtype=torch.int32)

    def completes(self, request, token_id):
        num_outputs = len(self.live[request.attempt_id, request.choice]) + 1
        if num_outputs == self.refused:
            raise GrammarError("does not follow")
        return num_outputs == self.complete

    def accept(self, request, token_ids):
        self.live[request.attempt_id, request.choice] += token_ids

    def release(self, request):
        self.live.pop((request.attempt_id, request.choice), None)


def test_request_waits_for_its_grammar_and_others_pass(harness):
    grammars = Grammars()
    h = harness(grammars=grammars, speculation=steady(harness.reference, 3, 0.4))
    c = Constraint("regex", "a*")
    h.submit(1, list(range(9)), constraint=c, n=2)
    h.submit(2, list(range(9)))
    h.submit(3, list(range(9)), constraint=c)
    h.submit(4, list(range(9)), constraint=c)
    h.drain()
    assert set(h.sink.finish) == {(2, 0)}
    grammars.post[3](GrammarFailed(3, "unbalanced"))
    grammars.post[1](GrammarReady(1))
    h.post(Cancel(4))
    h.drain()
    for choice in range(2):
        assert h.output(1, choice) == h.reference(list(range(9)), 8, choice)[0]
    assert (h.sink.failures[3].code, h.sink.failures[3].field) == (FailureCode.INVALID, "structured_output")
    grammars.post[4](GrammarReady(4))
    h.drain()
    assert grammars.live == {}
    h.assert_empty()


def test_masks_are_planned_for_sampling_entries_only(harness):
    grammars = Grammars()
    h = harness(grammars=grammars, prefill_chunk=4)
    masks = []
    h.executor.on_collect = lambda plan: masks.append(dict(plan.allowed))
    h.submit(1, list(range(9)), max_tokens=2, constraint=Constraint("regex", "a*"))
    h.step()
    grammars.post[1](GrammarReady(1))
    h.drain()
    assert [sorted(mask) for mask in masks] == [[], [], [0], [0]]
    h.assert_empty()


def test_constraint_without_grammar_support_is_refused(harness):
    h = harness()
    h.submit(1, [1, 2], constraint=Constraint("regex", "a*"))
    h.step()
    assert h.sink.failures[1].field == "structured_output"


C = Constraint("regex", "a*")


@pytest.mark.parametrize("complete", [1, 2, 6])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("speculate", [False, True])
def test_completed_constraint_ends_every_choice(harness, complete, n, speculate):
    grammars = Grammars(complete=complete)
    h = harness(grammars=grammars, speculation=steady(harness.reference, 3, 0.2) if speculate else None)
    h.submit(1, list(range(9)), max_tokens=20, constraint=C, n=n)
    h.step()
    grammars.post[1](GrammarReady(1))
    h.drain()
    for choice in range(n):
        assert h.output(1, choice) == h.reference(list(range(9)), complete, choice)[0]
        assert h.sink.finish[1, choice] is FinishReason.STOP
        assert h.sink.outputs[1, choice][-1].stop_token_id is None
    assert grammars.live == {}
    h.assert_empty()


def test_first_token_that_completes_the_constraint_ends_on_prefill(harness):
    grammars = Grammars(complete=1)
    h = harness("prefill", grammars=grammars)
    h.submit(1, list(range(9)), constraint=C, transfer_id=5, n=2)
    h.step()
    grammars.post[1](GrammarReady(1))
    h.drain()
    assert [first.finish for first in h.exports.firsts[5]] == [FinishReason.STOP] * 2
    h.assert_empty()


@pytest.mark.parametrize(
    ("role", "fault"),
    [
        ("prefill", {"refused": 1}),
        ("prefill", {"no_rows": 0}),
        ("decode", {"refused": 1}),
        ("decode", {"refused": 4}),
        ("decode", {"no_rows": 0}),
        ("decode", {"no_rows": 3}),
    ],
)
def test_constraint_that_can_go_no_further_fails_alone(harness, role, fault):
    prefill = role == "prefill"
    grammars = Grammars(**fault)
    h = harness(role, grammars=grammars, speculation=steady(harness.reference, 3, 0.2))
    h.submit(1, list(range(9)), constraint=C, n=2, transfer_id=5 if prefill else 0)
    h.submit(2, list(range(9)), transfer_id=6 if prefill else 0)
    h.step()
    grammars.post[1](GrammarReady(1))
    h.drain()
    assert (h.sink.failures[1].code, h.sink.failures[1].field) == (FailureCode.INVALID, "structured_output")
    assert set(h.sink.failures) == {1}
    if prefill:
        assert ("revoke", 5) in h.exports.log
        h.post(HoldEnded(6))
        h.step()
    else:
        assert h.output(2) == h.reference(list(range(9)), 8)[0]
    assert grammars.live == {}
    h.assert_empty()


def test_controller_sees_steps_that_only_generate(harness):
    controller = SpeculationController()
    h = harness(speculation=AdaptiveProposer(Oracle(harness.reference, 4, 0.0), controller), prefill_chunk=4)
    seen = []
    controller.observe = lambda *step: seen.append(step)

    def tick(plan):
        h.now += 0.5

    h.executor.on_collect = tick
    h.submit(1, list(range(9)), max_tokens=8)
    h.drain()
    assert [(batch, drafts, accepted) for batch, drafts, accepted, _ in seen] == [(1, 4, 4), (1, 1, 1)]
    assert all(seconds == pytest.approx(0.5) for *_, seconds in seen)
