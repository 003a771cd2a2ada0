"""Scheduler and block pool with several launched steps that have not retired, under random traffic.

A pipeline launches a step before the last one has come back. Whatever happens meanwhile (aborts in any state, victims,
failed steps, remote loads that end while a read may land), a block that a launched step writes, or that a read may
still reach, must not be handed out, and only those may share it who have the same tokens there. Books are balanced
after every operation; in the end all blocks are free.
"""

import dataclasses
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinpool.engine.request import Request, RequestState, SamplingParams, StopParams
from twinpool.engine.scheduler import Blocker


class OverlappedWalk:
    """``flying`` holds launched steps, oldest first: plan, and (request, computed before, blocks, tokens) per entry."""

    def __init__(self, harness, seed):
        self.rng = rng = random.Random(seed)
        self.depth = rng.choice([1, 2, 4])
        self.h = harness(
            max_in_flight=self.depth,
            num_blocks=rng.choice([12, 24, 60]),
            block_size=rng.choice([1, 2, 4]),
            max_num_seqs=rng.choice([2, 8]),
            max_num_batched_tokens=rng.choice([8, 32]),
            prefill_chunk=rng.choice([3, 16]),
            prefix_caching=rng.random() < 0.7,
            max_model_len=40,
        )
        self.scheduler = self.h.engine._scheduler
        self.tables = self.scheduler.tables
        self.live, self.flying, self.quarantine = [], [], []
        self.families = [[rng.randrange(900) for _ in range(30)] for _ in range(2)]
        self.seen = Counter()
        self.now = 0.0

    def submit(self):
        rng = self.rng
        self.seen["submit"] += 1
        limit = min(30, self.h.engine.max_model_len - 2)
        prompt = [*rng.choice(self.families)[: rng.randrange(20)], *(rng.randrange(900) for _ in range(3))][:limit]
        remote = rng.random() < 0.4
        request = Request(
            self.seen["submit"],
            prompt,
            SamplingParams(n=rng.choice([1, 1, 3])),
            StopParams(rng.randrange(1, 9)),
            priority=rng.choice([0, 0, 1]),
            transfer_id=self.seen["submit"] if remote else 0,
        )
        self.live.append(request)
        self.scheduler.submit(request, {Blocker.REMOTE_KV} if remote else set())

    def unblock(self):
        for request in list(self.scheduler.blocked):
            if self.rng.random() < 0.5:
                self.scheduler.unblock(request, Blocker.REMOTE_KV)

    def launch(self):
        if len(self.flying) >= self.depth:
            return
        before = self.scheduler.num_preemptions
        plan = self.scheduler.schedule(self.now)
        self.seen["preempted"] += self.scheduler.num_preemptions - before
        if not plan.scheduled:
            return
        self.seen["overlapped"] += bool(self.flying)
        busy = {request for _, writes in self.flying for request, *_ in writes}
        assert not busy & {entry.request for entry in plan.scheduled}
        size = self.tables.block_size
        writes = []
        for entry in plan.scheduled:
            first = entry.request.num_computed_tokens
            blocks = entry.request.block_ids[first // size : (first + entry.num_tokens - 1) // size + 1]
            tokens = entry.request.tokens(0, first + entry.num_tokens)
            writes.append((entry.request, first, list(blocks), tokens))
        self.flying.append((plan, writes))

    def land(self):
        if not self.flying:
            return
        plan, writes = self.flying.pop(0)
        failed = self.rng.random() < 0.05
        for entry, (request, first, _, _) in zip(plan.scheduled, writes, strict=True):
            assert request.state is not RequestState.WAITING, "preempted in flight"
            alive = request.state is RequestState.RUNNING
            assert not alive or request.num_computed_tokens == first
            if alive and failed:
                self.discard(request)
            elif alive:
                self.apply(entry)
        self.scheduler.retire(plan, failed=failed)
        self.seen["steps"] += 1

    def apply(self, entry):
        request = entry.request
        first = entry.samples and request.num_new_outputs == 0
        self.scheduler.advance(entry, 1)
        self.tables.commit(request)
        if not entry.samples:
            return
        if first:
            self.fork(request)
        request.output_ids.append(self.rng.randrange(900))
        if len(request.output_ids) >= request.stop.max_tokens or request.num_tokens >= 40:
            self.discard(request)

    def fork(self, source):
        for choice in range(1, source.sampling.n):
            target = dataclasses.replace(
                source,
                choice=choice,
                output_ids=[self.rng.randrange(900)],
                state=RequestState.WAITING,
                state_times={},
                num_computed_tokens=0,
                block_ids=[],
                draft_ids=[],
                last_step=0,
                block_hashes=[],
                num_cached_blocks=0,
            )
            self.live.append(target)
            self.scheduler.fork(source, target, self.now)
            self.seen["forks"] += 1

    def load(self):
        if self.scheduler.loading:
            request = self.rng.choice(list(self.scheduler.loading.values()))
            self.scheduler.loaded(request, self.now)
            self.fork(request)
            request.output_ids.append(self.rng.randrange(900))
            self.seen["loaded"] += 1

    def discard(self, request):
        self.seen[f"ended {request.state.value}"] += 1
        self.live.remove(request)
        blocks = self.scheduler.discard(request, self.now)
        if blocks:
            self.quarantine.append(blocks)

    def turn(self):
        rng = self.rng
        self.now += 1.0
        if rng.random() < 0.3 and len(self.live) < 20:
            self.submit()
        if rng.random() < 0.4:
            self.unblock()
        if rng.random() < 0.3:
            self.load()
        if rng.random() < 0.08 and self.live:
            self.discard(rng.choice(self.live))
        if rng.random() < 0.3 and self.quarantine:
            self.tables.pool.free(self.quarantine.pop(rng.randrange(len(self.quarantine))))
        if rng.random() < 0.02:
            self.tables.pool.reset_cache()
        self.launch()
        self.check()
        if rng.random() < 0.7:
            self.land()
        self.check()

    def check(self):
        owners = self.scheduler.owners()
        for blocks in self.quarantine:
            owners.update(blocks)
        self.tables.pool.check_integrity(owners)
        for _, writes in self.flying:
            for request, first, blocks, tokens in writes:
                for index, block in enumerate(blocks, first // self.tables.block_size):
                    assert self.tables.pool.references(block) > 0, f"step in flight writes free block {block}"
                    known = tokens[: (index + 1) * self.tables.block_size]
                    others = [r for r in self.live if r is not request and block in r.block_ids]
                    same = all(r.tokens(0, len(known)) == known for r in others)
                    assert same, f"step in flight writes block {block} of another request"

    def finish(self):
        while self.flying:
            self.land()
            self.check()
        for request in list(self.live):
            self.discard(request)
        for blocks in self.quarantine:
            self.tables.pool.free(blocks)
        self.quarantine = []
        self.launch()
        self.check()
        assert self.tables.pool.num_free == self.h.usable


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_random_walks_with_steps_in_flight(harness, seed):
    walk = OverlappedWalk(harness, seed)
    for _ in range(80):
        walk.turn()
    walk.finish()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_ten_thousand_steps_in_flight(harness, seed):
    walk = OverlappedWalk(harness, seed)
    while walk.seen["steps"] < 10_000:
        walk.turn()
    walk.finish()
    assert walk.seen["loaded"] > 100
    assert walk.seen["forks"] > 100
    assert walk.seen["ended loading"] > 0
    assert walk.seen["ended running"] > 100
    assert walk.depth == 1 or walk.seen["overlapped"] > 1_000
