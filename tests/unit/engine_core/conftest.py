"""An engine with a fake executor whose KV is real enough to catch any wrong block.

The fake does all of a step when it is collected, with what the plan said at launch, as the last stage of a pipeline
does: what was given away while the step was in flight shows. It keeps one number per (block, slot): a hash of the
prefix that ends there. Position p is computed from what the block table gives for p - 1, and tokens are sampled from
what was just written. So a shared, copied, reused or remotely written block that is not what it should be gives other
tokens than ``reference``.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict, deque
from dataclasses import dataclass, field

import pytest

from twinpool.decode_worker.policy import DecodePolicy
from twinpool.engine.commands import FirstToken, Submit
from twinpool.engine.core import Engine, EngineConfig
from twinpool.engine.exporter import Written
from twinpool.engine.plan import Sampled, StepPlan, StepResult
from twinpool.engine.ports import StepOutputs
from twinpool.engine.request import FinishReason, Request, SamplingParams, StopParams, TokenLogprob
from twinpool.prefill_worker.policy import PrefillPolicy

VOCAB = 997
EOS = 7


def mix(parent: int, token: int) -> int:
    return hash((parent, token, 0x5EED))


def sample(kv: int, choice: int) -> int:
    return hash((kv, choice)) % VOCAB


def prefix(tokens) -> int:
    kv = 0
    for token in tokens:
        kv = mix(kv, token)
    return kv


def reference(prompt, max_tokens, choice=0, max_model_len=10**9, eos=EOS, stop=(), output=()):
    """Output of a correct engine, and why it ended."""
    tokens, out = [*prompt, *output], list(output)
    while True:
        token = sample(prefix(tokens), choice)
        tokens.append(token)
        out.append(token)
        if token == eos or token in stop:
            return out, FinishReason.STOP
        if len(out) >= max_tokens or len(tokens) >= max_model_len:
            return out, FinishReason.LENGTH


class FakeExecutor:
    def __init__(self, num_blocks, block_size, num_layers=8, max_in_flight=1):
        self.num_blocks = num_blocks
        self.max_in_flight = max_in_flight
        self.flights = deque()
        self.most_in_flight = 0
        self.on_collect = lambda plan: None
        self.num_layers = num_layers
        self.block_size = block_size
        self.kv: dict[int, dict[int, int]] = defaultdict(dict)
        self.plans: list[list[tuple[int, int]]] = []
        self.fail = False
        self.max_tokens = 10**9

    @property
    def rank_layers(self):
        return [(0, self.num_layers)]

    def close(self):
        pass

    def launch(self, plan: StepPlan, layer_groups, on_layers):
        assert plan.scheduled
        assert len(self.flights) < self.max_in_flight
        busy = {e.request for flight, *_ in self.flights for e in flight.scheduled}
        assert not busy & {e.request for e in plan.scheduled}, "a request is in two steps"
        shots = [
            (e.request.num_computed_tokens, list(e.request.block_ids), list(e.request.draft_ids))
            for e in plan.scheduled
        ]
        self.flights.append((plan, shots, layer_groups, on_layers))
        self.most_in_flight = max(self.most_in_flight, len(self.flights))

    def collect(self):
        plan, shots, layer_groups, on_layers = self.flights.popleft()
        self.on_collect(plan)
        assert sum(e.num_tokens for e in plan.scheduled) <= self.max_tokens
        self.plans.append([(e.request.attempt_id, e.num_tokens) for e in plan.scheduled])
        if self.fail and not self.flights:
            raise RuntimeError("device lost")
        for source, target in plan.copies:
            self.kv[target] = dict(self.kv[source])
        if self.fail:
            raise RuntimeError("sampling failed")
        written: set[tuple[int, int]] = set()
        result = StepResult([self._one(e, *shot, written) for e, shot in zip(plan.scheduled, shots, strict=True)])
        if on_layers is not None:
            edges = [self.num_layers * i // layer_groups for i in range(layer_groups + 1)]
            for start, end in itertools.pairwise(edges):
                on_layers(0, start, end, Written())
        return result

    def _one(self, entry, start, block_ids, draft_ids, written):
        r, bs = entry.request, self.block_size
        known = r.tokens(start, min(start + entry.num_tokens, r.num_tokens))
        drafts = draft_ids[: entry.num_drafts]
        tokens = known + drafts
        assert len(tokens) == entry.num_tokens
        assert entry.samples == (start + entry.num_tokens - entry.num_drafts == r.num_tokens)
        kvs = []
        for offset, token in enumerate(tokens):
            p = start + offset
            parent = self.kv[block_ids[(p - 1) // bs]][(p - 1) % bs] if p else 0
            slot = (block_ids[p // bs], p % bs)
            assert slot[0] != 0
            assert slot not in written, "two requests write one slot"
            written.add(slot)
            self.kv[slot[0]][slot[1]] = mix(parent, token)
            kvs.append(self.kv[slot[0]][slot[1]])
        out = Sampled()
        if r.sampling.prompt_logprobs is not None and not r.output_ids:
            out.prompt_logprobs = [
                TokenLogprob(t, -1.0, 1) for p, t in enumerate(tokens, start) if 1 <= p < r.num_prompt_tokens
            ]
        if not entry.samples:
            return out
        if entry.num_samples > 1:
            out.token_ids = [sample(kvs[-1], r.choice + i) for i in range(entry.num_samples)]
        else:
            for i in range(entry.num_drafts + 1):
                token = sample(kvs[len(known) - 1 + i], r.choice)
                out.token_ids.append(token)
                if i < entry.num_drafts and drafts[i] != token:
                    break
        if r.sampling.logprobs is not None:
            out.logprobs = [TokenLogprob(t, -0.5, 1) for t in out.token_ids]
        return out


class Sink:
    def __init__(self):
        self.steps: list[StepOutputs] = []
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.first_index: dict[tuple[int, int], int] = {}
        self.finish: dict[tuple[int, int], FinishReason] = {}
        self.outputs = defaultdict(list)
        self.failures = {}
        self.loaded = []
        self.cached: set[bytes] = set()

    def emit(self, outputs):
        self.steps.append(outputs)
        seen = set()
        for o in outputs.outputs:
            key = (o.attempt_id, o.choice)
            assert key not in seen, "two outputs of one choice in one step"
            seen.add(key)
            assert key not in self.finish, "tokens after the end"
            assert o.token_ids
            self.first_index.setdefault(key, o.index)
            mine = self.tokens.setdefault(key, [])
            assert o.index == self.first_index[key] + len(mine)
            assert (o.stats is not None) == (not mine or o.finish is not None)
            mine.extend(o.token_ids)
            self.outputs[key].append(o)
            if o.finish is not None:
                self.finish[key] = o.finish
        for f in outputs.failures:
            assert f.attempt_id not in self.failures, "an attempt fails once"
            self.failures[f.attempt_id] = f
        self.loaded += outputs.loaded
        if outputs.cache_reset:
            self.cached.clear()
        for h in outputs.removed_hashes:
            self.cached.remove(h)
        assert not self.cached & set(outputs.stored_hashes)
        self.cached |= set(outputs.stored_hashes)


@dataclass
class Exports:
    """Records; ``read`` is what a decode worker would read of announced blocks at the moment of the call."""

    executor: FakeExecutor
    log: list = field(default_factory=list)
    layers: dict = field(default_factory=lambda: defaultdict(int))
    blocks: dict = field(default_factory=dict)
    firsts: dict = field(default_factory=dict)

    def begin(self, transfer_id, num_blocks):
        self.log.append(("begin", transfer_id, num_blocks))
        self.blocks[transfer_id] = [None] * num_blocks

    def announce(self, transfer_id, first_block, block_ids, layer_start, layer_end, event, rank):
        assert event.query()
        self.log.append(("announce", transfer_id, first_block, tuple(block_ids), layer_start, layer_end))
        for i, block in enumerate(block_ids, first_block):
            assert self.layers[transfer_id, i] == layer_start, "layers are announced in order, once"
            self.layers[transfer_id, i] = layer_end
            self.blocks[transfer_id][i] = block

    def final(self, transfer_id, num_tokens, first_tokens):
        assert all(
            self.layers[transfer_id, i] == self.executor.num_layers for i in range(len(self.blocks[transfer_id]))
        )
        self.log.append(("final", transfer_id, num_tokens))
        self.firsts[transfer_id] = tuple(first_tokens)

    def refuse(self, transfer_id, reason):
        self.log.append(("refuse", transfer_id))

    def revoke(self, transfer_id, reason):
        self.log.append(("revoke", transfer_id))

    def read(self, transfer_id):
        return [dict(self.executor.kv[b]) for b in self.blocks[transfer_id]]


@dataclass
class Imports:
    log: list = field(default_factory=list)
    targets: dict = field(default_factory=dict)

    def reserved(self, transfer_id, first_block, block_ids):
        self.log.append(("reserved", transfer_id, first_block, tuple(block_ids)))
        assert transfer_id not in self.targets
        self.targets[transfer_id] = (first_block, tuple(block_ids))

    def abandon(self, transfer_id):
        self.log.append(("abandon", transfer_id))


class Harness:
    """One engine, single-stepped with a clock of its own."""

    FirstToken = FirstToken
    EOS = EOS
    reference = staticmethod(reference)
    prefix = staticmethod(prefix)
    sample = staticmethod(sample)
    mix = staticmethod(mix)

    def __init__(
        self,
        role="decode",
        num_blocks=64,
        block_size=4,
        speculation=None,
        grammars=None,
        local=256,
        max_in_flight=1,
        **limits,
    ):
        config = EngineConfig(
            **{
                "max_model_len": 256,
                "vocab_size": VOCAB + 3,
                "revision": "r",
                "eos_token_ids": frozenset({EOS}),
                "block_size": block_size,
                "max_num_seqs": 16,
                "max_num_batched_tokens": 64,
                "prefill_chunk": 16,
                **limits,
            }
        )
        self.executor = FakeExecutor(num_blocks, block_size, max_in_flight=max_in_flight)
        self.executor.max_tokens = config.max_num_batched_tokens
        self.sink = Sink()
        self.exports = Exports(self.executor)
        self.imports = Imports()
        self.now = 100.0
        policy = PrefillPolicy() if role == "prefill" else DecodePolicy(local)
        self.engine = Engine(
            config,
            self.executor,
            policy,
            self.sink,
            self.exports,
            self.imports,
            lambda: self.now,
            speculation,
            grammars,
        )
        self.usable = num_blocks - 1

    def submit(self, attempt_id, prompt, max_tokens=8, n=1, output=(), transfer_id=0, sampling=None, **kwargs):
        stop = {k: kwargs.pop(k) for k in ("min_tokens", "stop_token_ids", "ignore_eos") if k in kwargs}
        request = Request(
            attempt_id,
            prompt,
            SamplingParams(n=n, **(sampling or {})),
            StopParams(max_tokens, **stop),
            output_ids=list(output),
            num_prior_outputs=len(output),
            transfer_id=transfer_id,
            **kwargs,
        )
        self.engine.post(Submit(request))
        return request

    def post(self, *commands):
        self.engine.post_many(commands)

    def step(self, times=1):
        more = False
        for _ in range(times):
            self.now += 0.01
            more = self.engine.step()
            self.engine.check_integrity()
        return more

    def drain(self, limit=2000):
        for _ in range(limit):
            if not self.step():
                return
        raise AssertionError("the engine does not come to rest")

    def write(self, transfer_id, tokens):
        """What a decode worker's read leaves behind: KV of ``tokens`` in the reserved blocks."""
        first, ids = self.imports.targets[transfer_id]
        bs, kv = self.executor.block_size, 0
        for p, token in enumerate(tokens):
            kv = mix(kv, token)
            if first <= p // bs < first + len(ids):
                self.executor.kv[ids[p // bs - first]][p % bs] = kv

    def firsts(self, tokens, n=1, choice=0, finished=()):
        return tuple(
            FirstToken(c, sample(prefix(tokens), c), FinishReason.STOP if c in finished else None)
            for c in range(choice, choice + n)
        )

    def output(self, attempt_id, choice=0):
        return self.sink.tokens.get((attempt_id, choice))

    def assert_empty(self):
        load = self.engine.load()
        assert (load.running, load.waiting, load.loading, load.held) == (0, 0, 0, 0)
        assert load.quarantined_blocks == 0
        assert load.queued_tokens == 0
        assert load.free_blocks == self.usable
        self.engine.check_integrity()
        assert load.cached_blocks == len(self.sink.cached)


@pytest.fixture(scope="session")
def harness():
    return Harness


@pytest.fixture
def rng():
    return random.Random(20)
