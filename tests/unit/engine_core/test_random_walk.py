"""Two engines, prefill and decode, joined by a scripted exchange, under random traffic, losses and failures.

After every step the books must balance. In the end both pools are empty, every attempt has ended once, and whatever
was said of a choice is what a correct engine says.
"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinpool.engine.commands import (
    Cancel,
    CancelOrigin,
    DestinationSafe,
    HoldEnded,
    RemoteFinished,
    RemoteLoaded,
    RemoteLost,
    RemoteReadable,
    ResetPrefixCache,
)
from twinpool.engine.request import FailureCode
from twinpool.engine.speculation import SteadyProposer


class Drafter:
    def __init__(self, reference, rng):
        self.reference, self.rng = reference, rng

    def propose(self, request):
        known, k = len(request.output_ids), self.rng.randrange(5)
        future = self.reference(request.prompt_ids, known + k, request.choice, eos=-1)[0][known:]
        return [t if self.rng.random() < 0.7 else t + 1 for t in future]


class Walk:
    """One walk; ``serving`` maps live attempts on decode to what was asked."""

    def __init__(self, harness, seed):
        self.rng = rng = random.Random(seed)
        limits = {
            "block_size": rng.choice([1, 2, 4, 16]),
            "prefix_caching": rng.random() < 0.8,
            "max_num_seqs": rng.choice([1, 3, 8]),
            "max_num_batched_tokens": rng.choice([8, 32, 128]),
            "prefill_chunk": rng.choice([3, 8, 64]),
            "max_in_flight": rng.choice([1, 1, 2, 4]),
        }
        tokens = rng.choice([48, 120, 400])
        blocks = tokens // limits["block_size"] + 1
        self.prefill = harness("prefill", num_blocks=blocks, layer_groups=rng.choice([1, 4]), **limits)
        drafter = SteadyProposer(Drafter(harness.reference, rng)) if rng.random() < 0.5 else None
        self.decode = harness("decode", num_blocks=blocks, speculation=drafter, local=rng.choice([2, 16]), **limits)
        self.families = [[rng.randrange(900) for _ in range(60)] for _ in range(3)]
        self.asked = {}
        self.pending = set()
        self.gone, self.abandoned = set(), set()
        self.cancelled = set()
        self.next_id = 0
        self.opened = set()
        self.unsafe = set()

    def submit(self):
        rng = self.rng
        self.next_id += 1
        attempt = self.next_id
        family = rng.choice(self.families)
        prompt = [*family[: rng.randrange(0, 40)], *(rng.randrange(900) for _ in range(rng.randrange(1, 8)))]
        if rng.random() < 0.2:
            prompt = family[: rng.randrange(1, 5) * 8]
        max_tokens, n = rng.randrange(1, rng.choice([14, 14, 40])), rng.choice([1, 1, 1, 2, 4])
        output = []
        if n == 1 and rng.random() < 0.2:
            output = self.decode.reference(prompt, max_tokens, eos=-1)[0][: rng.randrange(max_tokens)]
        kwargs = {
            "n": n,
            "output": output,
            "priority": rng.choice([0, 0, 1]),
            "origin": rng.randrange(3),
            "ignore_eos": True,
        }
        if rng.random() < 0.1:
            kwargs["deadline"] = self.decode.now + rng.random()
        self.asked[attempt] = (prompt, max_tokens, n, output)
        self.pending.add(attempt)
        if rng.random() < 0.7:
            kwargs["transfer_id"] = attempt
            self.prefill.submit(attempt, prompt, max_tokens, **kwargs)
        self.decode.submit(attempt, prompt, max_tokens, **kwargs)

    def exchange(self):
        """Moves every exchange on, as far as it can go, in random order and with random losses."""
        exports, imports = self.prefill.exports, self.decode.imports
        for transfer in self.rng.sample(sorted(exports.blocks), len(exports.blocks)):
            if transfer not in self.opened:
                self.opened.add(transfer)
                self.decode.post(RemoteReadable(transfer))
        self.gone |= {entry[1] for entry in exports.log if entry[0] in ("refuse", "revoke")}
        self.abandoned |= {entry[1] for entry in imports.log if entry[0] == "abandon"}
        exports.log.clear()
        imports.log.clear()
        for transfer in self.rng.sample(sorted(self.pending), len(self.pending)):
            reserved = transfer in imports.targets
            lost = transfer in self.gone or self.rng.random() < 0.01
            if transfer in self.abandoned or lost:
                self.pending.discard(transfer)
                if lost:
                    self.decode.post(RemoteLost(transfer, FailureCode.KV_LOST, "lost"))
                if reserved:
                    self.unsafe.add(transfer)
                self.prefill.post(HoldEnded(transfer))
            elif transfer in exports.firsts and self.rng.random() < 0.7:
                firsts = exports.firsts[transfer]
                if all(first.finish is not None for first in firsts):
                    self.pending.discard(transfer)
                    self.decode.post(RemoteFinished(transfer))
                    if reserved:
                        self.unsafe.add(transfer)
                elif reserved:
                    self.pending.discard(transfer)
                    self.read(transfer)
                    self.decode.post(RemoteLoaded(transfer, firsts, 0.1, 0.1, 1, "walk"))
                    self.prefill.post(HoldEnded(transfer))
        for transfer in sorted(self.unsafe):
            if self.rng.random() < 0.3:
                self.unsafe.discard(transfer)
                _, ids = imports.targets[transfer]
                for block in ids:  # what a late read does
                    self.decode.executor.kv[block] = dict.fromkeys(range(16), 1)
                self.decode.post(DestinationSafe(transfer))

    def read(self, transfer):
        first, ids = self.decode.imports.targets[transfer]
        source = self.prefill.exports.read(transfer)
        for index, block in enumerate(ids, first):
            self.decode.executor.kv[block] = dict(source[index])

    def turn(self):
        rng = self.rng
        if rng.random() < 0.35:
            self.submit()
        if self.asked and rng.random() < 0.06:
            victim = rng.choice(sorted(self.asked)[-12:])
            self.cancelled.add(victim)
            self.decode.post(Cancel(victim))
            self.prefill.post(Cancel(victim))
        if rng.random() < 0.003:
            origin = rng.randrange(3)
            self.cancelled |= set(self.asked)
            self.decode.post(CancelOrigin(origin))
            self.prefill.post(CancelOrigin(origin))
        if rng.random() < 0.01:
            rng.choice([self.decode, self.prefill]).post(ResetPrefixCache())
        self.exchange()
        for side in rng.sample([self.prefill, self.decode], 2):
            side.executor.fail = rng.random() < 0.01
            side.step(rng.randrange(3))
            side.executor.fail = False

    def check(self):
        for _ in range(3000):
            if self.prefill.step() | self.decode.step() | bool(self.unsafe) | self.busy():
                self.exchange()
            else:
                break
        self.decode.assert_empty()
        self.prefill.assert_empty()
        finished = 0
        for attempt, (prompt, max_tokens, n, output) in self.asked.items():
            failed = attempt in self.decode.sink.failures or attempt in self.prefill.sink.failures
            for choice in range(n):
                key = (attempt, choice)
                limit = self.decode.engine.max_model_len
                want, _ = self.decode.reference(prompt, max_tokens, choice, limit, eos=-1, output=output)
                for side in (self.prefill, self.decode):
                    said = side.sink.tokens.get(key, [])
                    assert said == want[len(output) :][: len(said)]
                ended = key in self.decode.sink.finish or key in self.prefill.sink.finish
                assert ended or failed or attempt in self.cancelled, f"attempt {attempt} never ended"
                if key in self.decode.sink.finish:
                    assert self.decode.sink.tokens[key] == want[len(output) :]
                    finished += 1
        return finished

    def busy(self):
        loads = [self.prefill.engine.load(), self.decode.engine.load()]
        return any(x.running + x.waiting + x.loading + x.held for x in loads)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_random_walks(harness, seed):
    walk = Walk(harness, seed)
    for _ in range(60):
        walk.turn()
    walk.check()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_ten_thousand_steps(harness, seed):
    walk = Walk(harness, seed)
    while walk.prefill.engine.load().steps + walk.decode.engine.load().steps < 10_000:
        walk.turn()
    assert walk.check() > 100
