"""Requests that one engine serves alone: lengths, chunks, sharing, preemption, aborts, failures."""

import threading

import pytest

from twinpool.engine.block_pool import IntegrityError
from twinpool.engine.commands import Cancel, CancelOrigin, ResetPrefixCache
from twinpool.engine.request import FailureCode, FinishReason


def check(h, attempt_id, prompt, max_tokens=8, choice=0, **kwargs):
    tokens, reason = h.reference(prompt, max_tokens, choice, **kwargs)
    assert h.output(attempt_id, choice) == tokens[len(kwargs.get("output", ())) :]
    assert h.sink.finish[attempt_id, choice] is reason


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33, 63, 64, 65])
@pytest.mark.parametrize("chunk", [1, 3, 16, 64])
def test_lengths_around_block_edges_and_chunks(harness, length, chunk):
    h = harness(prefill_chunk=chunk)
    prompt = list(range(100, 100 + length))
    for attempt in (1, 2):  # the second hits the cache
        h.submit(attempt, prompt)
        h.drain()
        check(h, attempt, prompt)
        stats = h.sink.outputs[attempt, 0][-1].stats
        assert stats.cached_tokens + stats.computed_tokens == length
        assert stats.cached_tokens == ((length - 1) // 4 * 4 if attempt == 2 else 0)
    h.assert_empty()


def test_a_partial_chunk_says_nothing(harness):
    # chunk 8 and 8 + 8 + 2 tokens: three steps, one token at the end.
    h = harness(prefill_chunk=8)
    h.submit(1, list(range(50, 68)), max_tokens=1)
    h.step(2)
    assert h.output(1) is None
    assert h.step() is False
    assert len(h.output(1)) == 1
    assert [[n for _, n in plan] for plan in h.executor.plans] == [[8], [8], [2]]
    load = h.engine.load()
    assert (load.batches, load.batch_requests, load.batch_tokens) == (3, 3, 18)
    h.assert_empty()


def test_batch_of_many_is_as_alone(harness, rng):
    h = harness(num_blocks=400)
    prompts = {}
    shared = [rng.randrange(900) for _ in range(40)]
    for attempt in range(1, 25):
        prompts[attempt] = shared[: rng.randrange(40)] + [rng.randrange(900) for _ in range(rng.randrange(1, 40))]
        h.submit(attempt, prompts[attempt], max_tokens=20)
    h.drain()
    for attempt, prompt in prompts.items():
        check(h, attempt, prompt, 20)
    assert max(len(plan) for plan in h.executor.plans) == 16
    h.assert_empty()


def test_decodes_come_before_prompt_chunks(harness):
    h = harness(max_num_batched_tokens=20, prefill_chunk=20, max_num_seqs=4, num_blocks=200)
    h.submit(1, [1] * 100, max_tokens=50)
    h.submit(2, [2, 3], max_tokens=50)
    h.submit(3, [3] * 100, max_tokens=50)
    h.step(9)
    assert h.executor.plans == [
        [(1, 20)],
        [(1, 20)],
        [(1, 20)],
        [(1, 20)],
        [(1, 20)],
        [(1, 1), (2, 2), (3, 17)],
        [(1, 1), (2, 1), (3, 18)],
        [(1, 1), (2, 1), (3, 18)],
        [(1, 1), (2, 1), (3, 18)],
    ]


def test_local_prompts_on_decode_have_a_budget_beside_decodes(harness):
    h = harness(local=4, num_blocks=200)
    h.submit(1, [5, 6], max_tokens=60)
    h.step(2)
    h.submit(2, list(range(300, 330)), max_tokens=2)
    h.step(3)
    assert h.executor.plans[-1] == [(1, 1), (2, 4)]
    h.drain()
    check(h, 2, list(range(300, 330)), 2)


def test_priority_then_arrival(harness):
    h = harness(max_num_seqs=1)
    order = []
    for attempt, priority in [(1, 0), (2, 5), (3, 5), (4, -1)]:
        h.submit(attempt, [attempt] * 5, max_tokens=2, priority=priority)
    while h.step():
        order += [a for plan in h.executor.plans[-1:] for a, _ in plan]
    order += [a for a, _ in h.executor.plans[-1]]
    assert list(dict.fromkeys(order)) == [4, 1, 2, 3]


def test_a_head_that_does_not_fit_is_not_skipped(harness):
    h = harness(num_blocks=11, max_num_seqs=4)
    h.submit(1, list(range(20)), max_tokens=4)
    h.submit(2, list(range(100, 120)), max_tokens=4)
    h.submit(3, [200, 201], max_tokens=4)
    h.step(2)
    assert {a for plan in h.executor.plans for a, _ in plan} == {1}
    h.drain()
    for attempt, prompt in [(1, range(20)), (2, range(100, 120)), (3, [200, 201])]:
        check(h, attempt, list(prompt), 4)
    h.assert_empty()


@pytest.mark.parametrize("caching", [True, False])
def test_preemption_by_a_tiny_pool_gives_the_same_tokens(harness, caching):
    h = harness(num_blocks=14, max_num_seqs=8, prefix_caching=caching)
    prompts = {a: [a * 11 + i for i in range(3)] for a in range(1, 6)}
    for attempt, prompt in prompts.items():
        h.submit(attempt, prompt, max_tokens=30)
    h.drain()
    assert h.engine.load().preemptions > 0
    for attempt, prompt in prompts.items():
        check(h, attempt, prompt, 30)
    assert h.sink.outputs[1, 0][-1].stats.preemptions == 0  # the oldest is never the victim
    h.assert_empty()


def test_nothing_is_admitted_in_a_step_that_preempted(harness):
    # 8 usable blocks. Both fill 4, then 1 needs a fifth and preempts 2; 3 would fit into what 2 leaves.
    h = harness(num_blocks=9)
    h.submit(1, [1, 2, 3], max_tokens=20)
    h.submit(2, [4, 5, 6], max_tokens=20)
    while h.engine.load().preemptions == 0:
        assert {a for plan in h.executor.plans for a, _ in plan} <= {1, 2}
        if len(h.executor.plans) == 14:
            h.submit(3, [9], max_tokens=1)
        h.step()
    assert len(h.executor.plans) == 15
    assert h.executor.plans[-1] == [(1, 1)]
    assert h.engine.load().free_blocks == 3
    assert h.engine.load().waiting == 2
    h.drain()
    check(h, 2, [4, 5, 6], 20)
    check(h, 3, [9], 1)
    h.assert_empty()


@pytest.mark.parametrize("length", [7, 8, 9])
@pytest.mark.parametrize("limits", [{}, {"max_num_seqs": 2}, {"num_blocks": 8}])
def test_choices_share_the_prompt_and_go_their_own_way(harness, length, limits):
    h = harness(**limits)
    prompt = list(range(10, 10 + length))
    h.submit(1, prompt, max_tokens=6, n=3)
    h.drain()
    for choice in range(3):
        check(h, 1, prompt, 6, choice)
    if not limits:
        assert sum(n for plan in h.executor.plans for _, n in plan) == length + 3 * 5
    h.assert_empty()


def test_choices_that_end_with_their_first_token_do_not_go_on(harness):
    h = harness()
    prompt = list(range(9))
    firsts = [h.sample(h.prefix(prompt), c) for c in range(3)]
    h.submit(1, prompt, max_tokens=6, n=3, stop_token_ids=frozenset({firsts[0], firsts[2]}))
    h.drain()
    assert h.output(1, 0) == firsts[:1]
    assert h.output(1, 2) == firsts[2:]
    assert h.sink.finish[1, 0] is FinishReason.STOP
    assert h.sink.outputs[1, 2][0].stop_token_id == firsts[2]
    check(h, 1, prompt, 6, 1, stop=(firsts[0], firsts[2]))
    h.assert_empty()


def test_forks_cancelled_before_their_copy_leave_nothing(harness):
    h = harness()
    h.submit(1, list(range(9)), max_tokens=6, n=3)
    h.step()
    h.post(Cancel(1))
    assert h.step() is False
    h.assert_empty()


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_cancel_in_any_state_frees_everything_within_a_step(harness, steps):
    h = harness(prefill_chunk=8)
    h.submit(1, list(range(20)), max_tokens=30, n=2)
    h.step(steps)
    h.post(Cancel(1), Cancel(99))
    said = len(h.sink.outputs[1, 0])
    h.step()
    assert len(h.sink.outputs[1, 0]) == said
    assert h.sink.failures == {}
    h.assert_empty()


def test_cancel_while_preempted_and_waiting(harness):
    h = harness(num_blocks=9)
    h.submit(1, [1, 2, 3], max_tokens=25)
    h.submit(2, [4, 5, 6], max_tokens=25)
    while not h.engine.load().preemptions:
        h.step()
    assert h.engine.load().waiting == 1
    h.post(Cancel(2))
    h.drain()
    check(h, 1, [1, 2, 3], 25)
    h.assert_empty()


def test_end_of_a_session_ends_its_attempts_only(harness):
    h = harness()
    h.submit(1, [1, 2, 3], max_tokens=9, origin=1)
    h.submit(2, [1, 2, 4], max_tokens=9, origin=2)
    h.submit(3, [1, 2, 5], max_tokens=9, origin=1)
    h.step(2)
    h.post(CancelOrigin(1))
    h.drain()
    check(h, 2, [1, 2, 4], 9)
    assert set(h.sink.finish) == {(2, 0)}
    h.assert_empty()


def test_deadline_fails_a_running_and_a_waiting_request(harness):
    h = harness(max_num_seqs=1)
    h.submit(1, [1, 2, 3], max_tokens=100, deadline=100.05)
    h.submit(2, [1, 2, 3], max_tokens=100, deadline=100.03)
    h.submit(3, [1, 2, 3], max_tokens=3, deadline=500.0)
    h.drain()
    assert {a: f.code for a, f in h.sink.failures.items()} == {1: FailureCode.DEADLINE, 2: FailureCode.DEADLINE}
    check(h, 3, [1, 2, 3], 3)
    h.assert_empty()


@pytest.mark.parametrize(
    ("prompt", "kwargs", "field"),
    [
        ([], {}, "prompt"),
        ([1] * 256, {}, "prompt"),
        ([1] * 252, {}, "prompt"),  # 63 usable blocks of 4 hold 252 tokens
        ([1, 2], {"max_tokens": 0}, "max_tokens"),
        ([1, 2], {"max_tokens": 2, "output": [3, 4]}, "max_tokens"),
        ([1, 2], {"n": 2, "output": [3, 4]}, "n"),
    ],
)
def test_what_can_never_be_served_is_refused_at_once(harness, prompt, kwargs, field):
    h = harness()
    h.submit(1, prompt, **kwargs)
    assert h.step() is False
    failure = h.sink.failures[1]
    assert (failure.code, failure.field) == (FailureCode.INVALID, field)
    if field == "prompt" and prompt:
        assert "252 tokens" in failure.message
        assert str(len(prompt)) in failure.message
    h.assert_empty()


def test_the_longest_possible_request_fills_every_block(harness):
    h = harness(num_blocks=6, max_num_seqs=3)
    h.submit(1, [1] * 5, max_tokens=1000)
    h.submit(2, [2] * 19, max_tokens=1000)
    h.drain()
    assert h.engine.max_model_len == 20
    check(h, 1, [1] * 5, 1000, max_model_len=20)
    check(h, 2, [2] * 19, 1000, max_model_len=20)
    h.assert_empty()


def test_a_failing_step_fails_its_requests_and_no_others(harness):
    h = harness(max_num_seqs=1)
    h.submit(1, list(range(9)), max_tokens=9)
    h.submit(2, list(range(9)), max_tokens=9)
    h.step(2)
    h.executor.fail = True
    h.step()
    h.executor.fail = False
    assert h.sink.failures[1].code is FailureCode.INTERNAL
    assert "device lost" in h.sink.failures[1].message
    h.drain()
    check(h, 2, list(range(9)), 9)
    h.assert_empty()


def test_a_failing_step_with_copies_leaves_nothing(harness):
    h = harness(max_num_seqs=8)
    h.submit(1, list(range(9)), max_tokens=9, n=2)
    h.step()
    assert h.engine.load().free_blocks == h.usable - 4
    h.executor.fail = True
    h.step()
    h.executor.fail = False
    assert h.sink.failures[1].code is FailureCode.INTERNAL
    h.step()
    h.assert_empty()


def test_prior_outputs_count_and_are_not_said_again(harness):
    h = harness()
    prompt = list(range(40, 50))
    whole, _ = h.reference(prompt, 12)
    h.submit(1, prompt, max_tokens=12, output=whole[:5])
    h.drain()
    assert h.sink.first_index[1, 0] == 5
    check(h, 1, prompt, 12, output=whole[:5])
    h.assert_empty()


def test_prompt_logprobs_skip_the_cache_and_come_once(harness):
    h = harness(prefill_chunk=8)
    prompt = list(range(40, 61))
    h.submit(1, prompt, max_tokens=3)
    h.drain()
    h.submit(2, prompt, max_tokens=3, sampling={"prompt_logprobs": 0, "logprobs": 0})
    h.drain()
    outputs = h.sink.outputs[2, 0]
    assert [p.token_id for p in outputs[0].prompt_logprobs] == prompt[1:]
    assert all(not o.prompt_logprobs for o in outputs[1:])
    assert [p.token_id for o in outputs for p in o.logprobs] == h.output(2)
    assert outputs[0].stats.cached_tokens == 0
    assert outputs[0].stats.computed_tokens == 21
    h.assert_empty()


def test_times_come_with_the_first_token_and_the_finish(harness):
    h = harness(max_num_seqs=1, prefill_chunk=4)
    h.submit(1, list(range(4)), max_tokens=3)
    h.submit(2, list(range(50, 58)), max_tokens=3)
    h.drain()
    first, last = h.sink.outputs[2, 0][0], h.sink.outputs[2, 0][-1]
    assert first.queue_s == pytest.approx(0.03)
    assert first.prefill_s == pytest.approx(0.01)
    assert (last.queue_s, last.prefill_s) == (first.queue_s, first.prefill_s)
    assert last.finish is FinishReason.LENGTH


def test_reset_of_the_prefix_cache(harness):
    h = harness()
    h.submit(1, list(range(20)), max_tokens=3)
    h.drain()
    h.post(ResetPrefixCache())
    h.step()
    assert h.sink.steps[-1].cache_reset
    h.assert_empty()
    h.submit(2, list(range(20)), max_tokens=3)
    h.drain()
    assert h.sink.outputs[2, 0][0].stats.cached_tokens == 0


def test_engine_thread_blocks_wakes_and_stops(harness):
    h = harness(idle_check_s=0.01)
    done = threading.Event()
    emit = h.sink.emit

    def notify(outputs):
        emit(outputs)
        if (1, 0) in h.sink.finish:
            done.set()

    h.sink.emit = notify
    thread = threading.Thread(target=h.engine.run)
    thread.start()
    h.submit(1, list(range(20)), max_tokens=5)
    assert done.wait(10)
    h.engine.stop()
    thread.join(10)
    assert not thread.is_alive()
    check(h, 1, list(range(20)), 5)
    h.assert_empty()


def test_idle_engine_checks_its_books(harness):
    h = harness(idle_check_s=0.01)
    h.engine._pool.allocate(1)  # a leak
    errors = []

    def run():
        try:
            h.engine.run()
        except IntegrityError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert "references" in str(errors[0])
