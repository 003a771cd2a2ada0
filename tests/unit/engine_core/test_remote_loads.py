"""Decode: reservation, confirmation, loss, quarantine."""

import pytest

from twinpool.engine.commands import (
    Cancel,
    DestinationSafe,
    RemoteFinished,
    RemoteLoaded,
    RemoteLost,
    RemoteReadable,
    Submit,
)
from twinpool.engine.request import FailureCode, FinishReason

T = 77


def loaded(firsts, transfer_id=T):
    return RemoteLoaded(transfer_id, firsts, 0.5, 0.1, 4096, "fake+shm")


def load(h, attempt_id, prompt, transfer_id=T, output=(), n=1, **kwargs):
    h.submit(attempt_id, prompt, output=output, n=n, transfer_id=transfer_id, **kwargs)
    h.post(RemoteReadable(transfer_id))
    h.step()
    h.write(transfer_id, [*prompt, *output])
    h.post(loaded(h.firsts([*prompt, *output], n), transfer_id))


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 16, 17])
@pytest.mark.parametrize("cached", [0, 5, 8, 20])
def test_remote_prompt_is_never_computed_here(harness, length, cached):
    h = harness()
    base = list(range(100, 120))
    if cached:
        h.submit(1, base[:cached], max_tokens=1)
        h.drain()
    computed = sum(n for plan in h.executor.plans for _, n in plan)
    prompt = base[:length]
    h.submit(2, prompt, transfer_id=T)
    assert h.step() is False
    assert h.imports.log == []
    h.post(RemoteReadable(T))
    h.step()
    hits = min(length, cached) // 4
    first, ids = h.imports.targets[T]
    assert (first, len(ids)) == (hits, -(-length // 4) - hits)
    assert h.engine.load().loading == 1
    h.write(T, prompt)
    h.post(loaded(h.firsts(prompt)))
    h.drain()
    assert h.output(2) == h.reference(prompt, 8)[0]
    assert sum(n for plan in h.executor.plans for _, n in plan) == computed + 7
    stats = h.sink.outputs[2, 0][-1].stats
    assert (stats.cached_tokens, stats.remote_tokens, stats.computed_tokens) == (hits * 4, length - hits * 4, 0)
    assert (stats.transfer_s, stats.exposed_transfer_s, stats.transfer_bytes, stats.transport) == (
        0.5,
        0.1,
        4096,
        "fake+shm",
    )
    assert h.sink.loaded == [(0, 2)]
    h.assert_empty()


def test_loaded_blocks_are_cached_only_after_confirmation(harness):
    h = harness()
    prompt = list(range(12))
    h.submit(1, prompt, transfer_id=1)
    h.post(RemoteReadable(1))
    h.step()
    h.submit(2, prompt, transfer_id=2)
    h.post(RemoteReadable(2))
    h.step()
    assert h.imports.targets[2][0] == 0
    h.write(1, prompt)
    h.write(2, prompt)
    h.post(loaded(h.firsts(prompt), 1), loaded(h.firsts(prompt), 2))
    h.drain()
    h.submit(3, prompt, transfer_id=3)
    h.post(RemoteReadable(3))
    h.step()
    assert h.imports.targets[3] == (3, ())
    h.post(loaded(h.firsts(prompt), 3))
    h.drain()
    for attempt in (1, 2, 3):
        assert h.output(attempt) == h.reference(prompt, 8)[0]
    h.assert_empty()


def test_prior_outputs_are_loaded_too(harness):
    h = harness()
    prompt = list(range(9))
    whole = h.reference(prompt, 12)[0]
    load(h, 1, prompt, output=whole[:4], max_tokens=12)
    h.drain()
    assert h.sink.first_index[1, 0] == 4
    assert h.output(1) == whole[4:]
    h.assert_empty()


@pytest.mark.parametrize("length", [7, 8])
def test_choices_load_once_and_fork(harness, length):
    h = harness()
    prompt = list(range(length))
    tokens = [h.sample(h.prefix(prompt), c) for c in range(4)]
    h.submit(1, prompt, n=4, transfer_id=T)
    h.post(RemoteReadable(T))
    h.step()
    h.write(T, prompt)
    h.post(loaded(h.firsts(prompt, 4, finished={0, 2})))
    h.drain()
    for choice in (1, 3):
        assert h.output(1, choice) == h.reference(prompt, 8, choice)[0]
    for choice in (0, 2):
        assert h.output(1, choice) == [tokens[choice]]
        assert h.sink.finish[1, choice] is FinishReason.STOP
    assert len(h.imports.targets[T][1]) == 2
    h.assert_empty()


def test_choice_of_a_retry_keeps_its_number(harness):
    h = harness()
    prompt = list(range(7))
    h.submit(1, prompt, choice=2, transfer_id=T)
    h.post(RemoteReadable(T))
    h.step()
    h.write(T, prompt)
    h.post(loaded(h.firsts(prompt, choice=2)))
    h.drain()
    assert h.output(1, 2) == h.reference(prompt, 8, 2)[0]
    h.assert_empty()


def test_wrong_first_tokens_fail_one_attempt(harness):
    h = harness()
    load(h, 1, list(range(7)), n=2)
    h.submit(2, list(range(7)), transfer_id=2)
    h.post(RemoteReadable(2))
    h.step()
    h.write(2, list(range(7)))
    h.post(loaded(h.firsts(list(range(7)), 2), 2))
    h.drain()
    assert h.sink.failures[2].code is FailureCode.INTERNAL
    assert h.output(1, 1) == h.reference(list(range(7)), 8, 1)[0]
    h.assert_empty()


def test_unreadable_requests_are_skipped_not_waited_for(harness):
    h = harness()
    h.submit(1, list(range(9)), transfer_id=T)
    h.submit(2, list(range(9)), max_tokens=3)
    h.drain()
    assert h.output(2) == h.reference(list(range(9)), 3)[0]
    assert h.engine.load().waiting == 1
    assert h.engine.load().queued_tokens == 0
    h.post(Cancel(1))
    h.step()
    assert h.imports.log == [("abandon", T)]
    h.assert_empty()


def test_joint_admission_keeps_growth_blocks(harness):
    # 15 usable blocks: attempt 1 runs on 4; 9 more and a growth block for each leave no room for a third.
    h = harness(num_blocks=16)
    load(h, 1, list(range(14)), max_tokens=40, ignore_eos=True)
    h.step()
    h.submit(2, list(range(100, 136)), transfer_id=2)
    h.submit(3, list(range(200, 204)), transfer_id=3)
    h.post(RemoteReadable(3), RemoteReadable(2))
    h.step()
    assert list(h.imports.targets) == [T, 2]
    assert h.engine.load().free_blocks == 2
    h.write(2, list(range(100, 136)))
    h.post(loaded(h.firsts(list(range(100, 136))), 2))
    h.drain()
    h.write(3, list(range(200, 204)))
    h.post(loaded(h.firsts(list(range(200, 204))), 3))
    h.drain()
    assert h.output(3) == h.reference(list(range(200, 204)), 8)[0]
    h.assert_empty()


def test_preempted_after_loading_is_recomputed_here(harness):
    h = harness(num_blocks=11, prefix_caching=False)
    load(h, 1, list(range(9)), transfer_id=1, max_tokens=20)
    h.step()
    load(h, 2, list(range(50, 59)), transfer_id=2, max_tokens=20)
    h.drain()
    assert h.output(1) == h.reference(list(range(9)), 20)[0]
    assert h.output(2) == h.reference(list(range(50, 59)), 20)[0]
    stats = h.sink.outputs[2, 0][-1].stats
    assert stats.preemptions >= 1
    assert stats.computed_tokens > 0
    assert stats.remote_tokens == 9
    h.assert_empty()


def end_by_loss(h):
    h.post(RemoteLost(T, FailureCode.KV_LOST, "prefill died"))


def end_by_cancel(h):
    h.post(Cancel(1))


def end_by_finish(h):
    h.post(RemoteFinished(T))


def end_by_deadline(h):
    h.now += 10


ENDS = {
    end_by_loss: FailureCode.KV_LOST,
    end_by_cancel: None,
    end_by_finish: None,
    end_by_deadline: FailureCode.DEADLINE,
}


@pytest.mark.parametrize("end", ENDS)
def test_ended_before_reservation_has_no_blocks(harness, end):
    h = harness()
    h.submit(1, list(range(9)), transfer_id=T, deadline=105.0)
    h.step()
    end(h)
    h.step()
    assert h.imports.log == ([("abandon", T)] if end in (end_by_cancel, end_by_deadline) else [])
    assert [f.code for f in h.sink.failures.values()] == ([ENDS[end]] if ENDS[end] else [])
    h.assert_empty()


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("late", [1, 5])
def test_ended_while_loading_stays_in_quarantine_until_safe(harness, end, late):
    h = harness(num_blocks=6)
    h.submit(1, list(range(9)), transfer_id=T, deadline=105.0)
    h.post(RemoteReadable(T))
    h.step()
    end(h)
    h.step()
    assert [e[0] for e in h.imports.log] == (
        ["reserved", "abandon"] if end in (end_by_cancel, end_by_deadline) else ["reserved"]
    )
    assert [f.code for f in h.sink.failures.values()] == ([ENDS[end]] if ENDS[end] else [])
    h.submit(2, list(range(100, 112)), max_tokens=4)
    h.step(late)
    assert h.engine.load().quarantined_blocks == 3
    assert h.engine.load().free_blocks == 2
    assert h.output(2) is None
    assert h.sink.cached == set()
    h.write(T, [9] * 9)  # the late read lands where nobody looks
    h.post(DestinationSafe(T))
    h.drain()
    assert h.output(2) == h.reference(list(range(100, 112)), 4)[0]
    h.assert_empty()


def test_cancel_that_crosses_the_confirmation(harness):
    h = harness()
    h.submit(1, list(range(9)), transfer_id=T)
    h.post(RemoteReadable(T))
    h.step()
    h.post(Cancel(1), loaded(h.firsts(list(range(9)))))
    h.step()
    assert h.output(1) is None
    h.assert_empty()


def test_confirmation_and_cancel_in_one_batch_say_nothing(harness):
    h = harness()
    h.submit(1, list(range(9)), transfer_id=T)
    h.post(RemoteReadable(T))
    h.step()
    h.post(loaded(h.firsts(list(range(9)))), Cancel(1))
    h.step()
    assert h.output(1) is None
    assert h.sink.loaded == []
    assert ("abandon", T) not in h.imports.log
    h.assert_empty()


def test_safe_before_lost_frees_at_once(harness):
    h = harness()
    h.submit(1, list(range(9)), transfer_id=T)
    h.post(RemoteReadable(T))
    h.step()
    h.post(DestinationSafe(T), RemoteLost(T, FailureCode.KV_LOST, "gone"))
    h.step()
    assert h.sink.failures[1].code is FailureCode.KV_LOST
    h.assert_empty()


def test_late_messages_of_unknown_exchanges_are_ignored(harness):
    h = harness()
    h.post(
        RemoteReadable(5), loaded((), 5), RemoteFinished(5), RemoteLost(5, FailureCode.KV_LOST, ""), DestinationSafe(5)
    )
    h.step()
    assert h.sink.steps == []
    h.assert_empty()


def test_refused_submit_abandons_the_exchange(harness):
    h = harness()
    h.submit(1, [1] * 1000, transfer_id=T)
    h.step()
    assert h.imports.log == [("abandon", T)]
    assert h.sink.failures[1].code is FailureCode.INVALID
    h.assert_empty()


def test_second_submit_of_a_live_attempt_is_ignored(harness):
    h = harness()
    request = h.submit(1, list(range(9)), max_tokens=3)
    h.step()
    h.post(Submit(request))
    h.drain()
    assert h.output(1) == h.reference(list(range(9)), 3)[0]
    h.assert_empty()
