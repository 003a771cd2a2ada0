"""Prefill: announcements, the hold, and every way it ends."""

import pytest

from twinpool.engine.commands import Cancel, HoldEnded
from twinpool.engine.request import FailureCode, FinishReason

T = 77


def test_walk_through_of_announcements(harness):
    h = harness("prefill", prefill_chunk=8)
    prompt = list(range(100, 121))  # 21 tokens: 5 full blocks and one of a single token
    h.submit(1, prompt, transfer_id=T)
    h.drain()
    assert h.exports.log == [
        ("begin", T, 6),
        ("announce", T, 0, (1, 2), 0, 8),
        ("announce", T, 2, (3, 4), 0, 8),
        ("announce", T, 4, (5, 6), 0, 2),
        ("announce", T, 4, (5, 6), 2, 4),
        ("announce", T, 4, (5, 6), 4, 6),
        ("announce", T, 4, (5, 6), 6, 8),
        ("final", T, 21),
    ]
    token = h.sample(h.prefix(prompt), 0)
    assert h.output(1) == [token]
    assert h.sink.finish == {}
    assert h.exports.firsts[T] == (h.FirstToken(0, token),)
    assert h.exports.read(T)[5][0] == h.prefix(prompt)
    load = h.engine.load()
    assert (load.held, load.running, load.free_blocks) == (1, 0, h.usable - 6)
    h.post(HoldEnded(T))
    h.step()
    h.assert_empty()


def test_prefix_hits_are_announced_at_once(harness):
    h = harness("prefill")
    h.submit(1, list(range(12)), transfer_id=1)
    h.drain()
    h.submit(2, list(range(14)), transfer_id=2)
    h.drain()
    mine = [entry for entry in h.exports.log if entry[1] == 2]
    assert mine[:2] == [("begin", 2, 4), ("announce", 2, 0, (1, 2, 3), 0, 8)]
    assert [entry[2:4] for entry in mine[2:6]] == [(3, (4,))] * 4
    h.post(HoldEnded(1), HoldEnded(2))
    h.step()
    h.assert_empty()


def test_held_blocks_count_and_new_prefills_wait(harness):
    h = harness("prefill", num_blocks=8)
    h.submit(1, list(range(16)), transfer_id=1)
    h.submit(2, list(range(100, 116)), transfer_id=2)
    assert h.step(3) is False
    load = h.engine.load()
    assert (load.held, load.waiting, load.running, load.queued_tokens) == (1, 1, 0, 16)
    h.post(HoldEnded(1))
    h.drain()
    assert h.engine.load().held == 1
    h.post(HoldEnded(2))
    h.step()
    h.assert_empty()


def test_the_whole_prompt_is_reserved_so_that_a_started_prefill_ends(harness):
    h = harness("prefill", num_blocks=12, prefill_chunk=4, max_num_seqs=8)
    h.submit(1, list(range(32)), transfer_id=1)
    h.submit(2, list(range(100, 132)), transfer_id=2)
    h.submit(3, [1, 2, 3], max_tokens=30)  # behind the head, not before it
    h.drain()
    assert h.engine.load().preemptions == 0
    h.post(HoldEnded(1))
    h.drain()
    h.post(HoldEnded(2))
    h.drain()
    assert h.output(3) == h.reference([1, 2, 3], 30)[0]
    h.assert_empty()


def test_a_promise_is_never_the_victim(harness):
    # The local request needs blocks while a promised prefill, younger and of lower priority, is under way.
    h = harness("prefill", num_blocks=11, prefill_chunk=2, max_num_seqs=8)
    h.submit(1, [1, 2, 3], max_tokens=24)
    h.step(2)
    h.submit(2, list(range(100, 128)), transfer_id=2, priority=9)
    h.drain()
    assert h.engine.load().preemptions >= 1
    assert [entry[0] for entry in h.exports.log].count("begin") == 1
    assert h.exports.log[-1] == ("final", 2, 28)
    h.post(HoldEnded(2))
    h.drain()
    assert h.output(1) == h.reference([1, 2, 3], 24)[0]
    h.assert_empty()


@pytest.mark.parametrize("max_tokens", [1, 8])
def test_finished_with_the_first_token(harness, max_tokens):
    h = harness("prefill")
    prompt = list(range(9))
    token = h.sample(h.prefix(prompt), 0)
    h.submit(1, prompt, max_tokens=max_tokens, transfer_id=T, stop_token_ids=frozenset({token}))
    h.drain()
    assert h.exports.log[-1][0] == "final"
    assert h.exports.firsts[T][0].finish is FinishReason.STOP
    assert h.sink.finish[1, 0] is FinishReason.STOP
    h.assert_empty()


def test_choices_of_one_prompt(harness):
    h = harness("prefill")
    prompt = list(range(9))
    tokens = [h.sample(h.prefix(prompt), c) for c in range(3)]
    h.submit(1, prompt, n=3, transfer_id=T, stop_token_ids=frozenset({tokens[1]}))
    h.drain()
    firsts = h.exports.firsts[T]
    assert [(f.choice, f.token_id) for f in firsts] == list(enumerate(tokens))
    assert [f.finish for f in firsts] == [None, FinishReason.STOP, None]
    assert [h.output(1, c) for c in range(3)] == [[token] for token in tokens]
    assert set(h.sink.finish) == {(1, 1)}
    assert h.engine.load().held == 1
    h.post(HoldEnded(T))
    h.step()
    h.assert_empty()


def test_prior_outputs_are_part_of_what_is_computed(harness):
    h = harness("prefill")
    prompt = list(range(9))
    output = h.reference(prompt, 4)[0]
    h.submit(1, prompt, max_tokens=9, output=output, transfer_id=T)
    h.drain()
    assert h.exports.log[-1] == ("final", T, 13)
    assert h.sink.first_index[1, 0] == 4
    assert h.exports.firsts[T][0].token_id == h.reference(prompt, 9)[0][4]
    h.post(HoldEnded(T))
    h.step()
    h.assert_empty()


@pytest.mark.parametrize(("steps", "call"), [(0, "refuse"), (1, "revoke"), (2, "revoke"), (5, "revoke")])
def test_cancel_in_any_state_revokes_before_it_frees(harness, steps, call):
    h = harness("prefill", prefill_chunk=8)
    h.submit(1, list(range(30)), transfer_id=T)
    if steps:
        h.step(steps)
    free = []
    original = h.exports.revoke
    h.exports.revoke = lambda *a: (free.append(h.engine._pool.num_free), original(*a))
    h.post(Cancel(1))
    h.step()
    assert h.exports.log[-1] == (call, T)
    assert free == ([h.usable - 8] if call == "revoke" else [])
    h.post(HoldEnded(T))
    h.step()
    assert h.sink.failures == {}
    h.assert_empty()


def test_refused_submit_is_told_to_the_exchange(harness):
    h = harness("prefill")
    h.submit(1, [1] * 1000, transfer_id=T)
    h.step()
    assert h.exports.log == [("refuse", T)]
    assert h.sink.failures[1].code is FailureCode.INVALID
    h.assert_empty()


def test_an_exchange_in_use_is_left_alone(harness):
    h = harness("prefill")
    h.submit(1, list(range(9)), transfer_id=T)
    h.drain()
    h.submit(2, list(range(9)), transfer_id=T)
    h.drain()
    assert h.sink.failures[2].field == "transfer_id"
    assert h.engine.load().held == 1
    assert h.exports.log[-1][0] == "final"
    h.post(Cancel(1))
    h.step()
    h.assert_empty()


@pytest.mark.parametrize("steps", [0, 2])
def test_a_hold_that_ends_early_fails_the_attempt(harness, steps):
    h = harness("prefill", prefill_chunk=4)
    h.submit(1, list(range(30)), transfer_id=T)
    if steps:
        h.step(steps)
    h.post(HoldEnded(T))
    h.step()
    assert h.sink.failures[1].code is FailureCode.KV_LOST
    h.assert_empty()


def test_deadline_of_a_hold(harness):
    h = harness("prefill")
    h.submit(1, list(range(9)), transfer_id=T, deadline=h.now + 1)
    h.drain()
    h.now += 2
    h.step()
    assert h.exports.log[-1] == ("revoke", T)
    assert h.sink.failures[1].code is FailureCode.DEADLINE
    h.assert_empty()


def test_a_failing_step_revokes(harness):
    h = harness("prefill", prefill_chunk=8)
    h.submit(1, list(range(20)), transfer_id=T)
    h.step()
    h.executor.fail = True
    h.step()
    assert h.exports.log[-1] == ("revoke", T)
    assert h.sink.failures[1].code is FailureCode.INTERNAL
    h.assert_empty()
