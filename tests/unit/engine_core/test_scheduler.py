"""Scheduler corners that need single steps."""

from collections import Counter

from twinpool.engine.request import Request, SamplingParams, StopParams


def test_a_victim_already_chosen_in_this_step_is_taken_back(harness):
    # 7 usable blocks. Low priority request 1 is planned first and takes the last block; then 2 lacks one.
    h = harness(num_blocks=8, max_num_batched_tokens=4, max_num_seqs=4)
    h.submit(1, [1, 2, 3], max_tokens=20, priority=5)
    h.step()
    h.submit(2, [4, 5, 6], max_tokens=20)
    while h.engine.load().preemptions == 0:
        h.step()
    assert h.executor.plans[-1] == [(2, 1)]
    assert h.executor.plans[-2] == [(1, 1), (2, 1)]
    h.drain()
    for attempt, prompt in [(1, [1, 2, 3]), (2, [4, 5, 6])]:
        assert h.output(attempt) == h.reference(prompt, 20)[0]
    assert h.sink.outputs[1, 0][-1].stats.preemptions >= 1
    assert h.sink.outputs[2, 0][-1].stats.preemptions == 0
    first, last = h.sink.outputs[1, 0][0], h.sink.outputs[1, 0][-1]
    assert (last.queue_s, last.prefill_s) == (first.queue_s, first.prefill_s)
    h.assert_empty()


def test_blocks_of_a_step_in_flight_come_back_when_it_retires(harness):
    h = harness(max_in_flight=2)
    scheduler = h.engine._scheduler
    pool = scheduler.tables.pool
    first, second = (Request(a, [a] * 9, SamplingParams(), StopParams(9)) for a in (1, 2))
    scheduler.submit(first, set())
    step_1 = scheduler.schedule(1.0)
    scheduler.submit(second, set())
    step_2 = scheduler.schedule(1.0)  # launched before step 1 has retired
    assert [entry.request for entry in step_2.scheduled] == [second]
    scheduler.discard(second, 1.0)
    assert pool.num_free == h.usable - 6
    pool.check_integrity(scheduler.owners())
    scheduler.retire(step_1)
    assert pool.num_free == h.usable - 6
    scheduler.retire(step_2)
    assert pool.num_free == h.usable - 3
    scheduler.discard(first, 1.0)
    assert pool.num_free == h.usable
    pool.check_integrity(Counter())


def test_more_choices_than_seats_run_one_after_another(harness):
    h = harness(max_num_seqs=2)
    h.submit(1, list(range(9)), max_tokens=5, n=5)
    h.submit(2, list(range(9)), max_tokens=5)
    h.drain()
    assert max(len(plan) for plan in h.executor.plans) == 2
    for choice in range(5):
        assert h.output(1, choice) == h.reference(list(range(9)), 5, choice)[0]
    assert h.output(2) == h.reference(list(range(9)), 5)[0]
    h.assert_empty()
