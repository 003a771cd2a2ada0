"""In float32 on a CPU logits do not depend, to the bit, on what a step computes beside them."""

from __future__ import annotations

import pytest
import torch

from twinpool.decode_worker.policy import DecodePolicy
from twinpool.engine.commands import Submit
from twinpool.engine.core import Engine, EngineConfig
from twinpool.engine.executor import build_executor
from twinpool.engine.no_exchange import NoExports, NoImports
from twinpool.engine.request import Request, SamplingParams, StopParams
from twinpool.engine.sampler import Sampler
from twinpool.engine.speculation import SteadyProposer

PROMPT, ANSWER, VOCAB = 45, 40, 4096
FAMILIES = {"gemma3": {}, "mixtral": {}, "llama": {"num_attention_heads": 8, "num_key_value_heads": 1}}


class Recorder(Sampler):
    """Keeps the logits of request 1 by the index of the output that they decide; the last ones, since a step may check
    drafts that are wrong."""

    def sample(self, logits, scheduled, allowed):
        row = 0
        for entry in scheduled:
            if entry.request.attempt_id == 1:
                for draft in range(1 + entry.num_drafts):
                    self.seen[len(entry.request.output_ids) + draft] = logits[row + draft].clone()
            row += 1 + entry.num_drafts
        return super().sample(logits, scheduled, allowed)


class Drafts:
    """Four tokens of a known answer; every third time the second one is wrong."""

    def __init__(self, answer):
        self._answer, self._calls = answer, 0

    def propose(self, request):
        known = len(request.output_ids)
        drafts = self._answer[known : known + 4] if request.attempt_id == 1 else []
        self._calls += 1
        if self._calls % 3 == 0 and len(drafts) > 1:
            drafts[1] = (drafts[1] + 1) % VOCAB
        return drafts


class Collect:
    def __init__(self):
        self.tokens = []

    def emit(self, outputs):
        self.tokens += [token for out in outputs.outputs if out.attempt_id == 1 for token in out.token_ids]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_seeded_tokens_are_the_same_beside_anything(tmp_path, make_tiny_model, random_prompt, family):
    folder = make_tiny_model(family, tmp_path, vocab_size=VOCAB, **FAMILIES[family])
    built = build_executor(
        folder,
        dtype="float32",
        device=torch.device("cpu"),
        block_size=16,
        num_blocks=300,
        allocate=lambda size, device: torch.zeros(size, dtype=torch.uint8, device=device),
        make_sampler=Recorder,
    )

    def run(others=0, speculation=None, **limits):
        built.executor._sampler.seen = seen = {}
        config = EngineConfig(max_model_len=500, vocab_size=VOCAB, revision="test", **limits)
        sink = Collect()
        engine = Engine(
            config, built.executor, DecodePolicy(256), sink, NoExports(), NoImports(), speculation=speculation
        )
        for attempt in range(2, others + 2):
            sampling = SamplingParams(temperature=1.5, seed=attempt)
            stop = StopParams(ANSWER + attempt, ignore_eos=True)
            engine.post(Submit(Request(attempt, random_prompt(3 * attempt), sampling, stop)))
            engine.step()
        stop = StopParams(ANSWER, ignore_eos=True)
        engine.post(Submit(Request(1, random_prompt(PROMPT), SamplingParams(temperature=1.5, seed=7), stop)))
        while engine.step():
            pass
        return sink.tokens, [seen[i] for i in range(ANSWER)], engine.load().steps

    tokens, logits, steps = run()
    drafted = run(speculation=SteadyProposer(Drafts(tokens)))
    assert drafted[2] < steps, "no draft was accepted"
    for name, (other_tokens, other_logits, _) in {
        "drafts": drafted,
        "a batch of 16": run(others=15),
        "chunks": run(prefill_chunk=7),
        "chunks, drafts and a batch": run(others=5, prefill_chunk=16, speculation=SteadyProposer(Drafts(tokens))),
    }.items():
        different = [i for i in range(ANSWER) if not torch.equal(logits[i], other_logits[i])]
        assert different == [], f"{name}: logits differ"
        assert other_tokens == tokens, name
