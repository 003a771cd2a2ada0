"""A small engine around the executor: greedy sampling, explicit blocks, any chunking; and transformers as the truth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from steps import run_step

from twinpool.engine.executor import BuiltExecutor, build_executor
from twinpool.engine.plan import OnLayers, Sampled, ScheduledRequest, StepPlan
from twinpool.engine.request import Request, SamplingParams, StopParams, TokenLogprob

CPU = torch.device("cpu")


class GreedySampler:
    """Takes the likeliest token; keeps the logits it was given."""

    def __init__(self, vocab_size: int, stop_ids: frozenset[int], device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.calls: list[torch.Tensor] = []

    def sample(
        self, logits: torch.Tensor, scheduled: Sequence[ScheduledRequest], allowed: Sequence[torch.Tensor | None]
    ) -> list[Sampled]:
        assert len(allowed) == len(scheduled)
        self.calls.append(logits.clone())
        best = logits.argmax(-1).tolist()
        sampled, row = [], 0
        for item in scheduled:
            rows = 1 + item.num_drafts
            tokens = [best[row]] * item.num_samples if item.num_samples > 1 else [best[row]]
            for draft in range(item.num_drafts):
                if item.request.draft_ids[draft] != tokens[-1]:
                    break
                tokens.append(best[row + draft + 1])
            sampled.append(Sampled(tokens))
            row += rows
        assert row == logits.shape[0]
        return sampled

    def prompt_logprobs(self, logits: torch.Tensor, token_ids: Sequence[int], top: int) -> list[TokenLogprob]:
        logprobs = logits.log_softmax(-1)
        return [TokenLogprob(token, float(logprobs[row, token]), 1) for row, token in enumerate(token_ids)]


class Harness:
    """One executor and the blocks it has; requests get blocks in the order of ``free``."""

    def __init__(self, built: BuiltExecutor) -> None:
        self.built = built
        self.executor = built.executor
        self.free = list(range(1, built.num_blocks))
        self._steps = 0

    @property
    def sampler(self) -> GreedySampler:
        sampler = self.executor._sampler
        assert isinstance(sampler, GreedySampler)
        return sampler

    def request(self, prompt: Sequence[int], max_tokens: int, prompt_logprobs: int | None = None) -> Request:
        sampling = SamplingParams(temperature=0, prompt_logprobs=prompt_logprobs)
        request = Request(len(prompt), list(prompt), sampling, StopParams(max_tokens))
        count = -(-(len(prompt) + max_tokens) // self.built.layout.block_size)
        request.block_ids, self.free = self.free[:count], self.free[count:]
        assert len(request.block_ids) == count
        return request

    def release(self, request: Request) -> None:
        self.free += request.block_ids
        request.block_ids = []

    def step(
        self, work: Sequence[tuple[Request, int]], layer_groups: int = 1, on_layers: OnLayers | None = None
    ) -> list[Sampled]:
        """Computes n tokens of each request; samples where that reaches the last known token."""
        scheduled = [ScheduledRequest(r, n, samples=r.num_computed_tokens + n == r.num_tokens) for r, n in work]
        self._steps += 1
        sampled = run_step(self.executor, StepPlan(self._steps, scheduled), layer_groups, on_layers).sampled
        for (request, num_tokens), result in zip(work, sampled, strict=True):
            request.num_computed_tokens += num_tokens
            request.output_ids += result.token_ids
        return sampled

    def generate(self, request: Request, chunk: int = 1 << 30) -> list[int]:
        """Runs a request alone to its end."""
        while len(request.output_ids) < request.stop.max_tokens:
            self.step([(request, min(chunk, request.num_tokens - request.num_computed_tokens))])
        return request.output_ids


MakeHarness = Callable[..., Harness]


@pytest.fixture
def make_harness() -> MakeHarness:
    """A function (folder, dtype, block_size, num_blocks) -> Harness. Fresh KV memory holds NaN, not zeros."""

    def make(folder: Path, dtype: str = "float32", block_size: int = 16, num_blocks: int = 64) -> Harness:
        built = build_executor(
            folder,
            dtype=dtype,
            device=CPU,
            block_size=block_size,
            num_blocks=num_blocks,
            allocate=lambda size, device: torch.full((size,), 0xFF, dtype=torch.uint8, device=device),
            make_sampler=GreedySampler,
        )
        return Harness(built)

    return make


@pytest.fixture
def reference() -> Callable[[Path], torch.nn.Module]:
    """A function folder -> transformers model, float32, eager attention."""

    def load(folder: Path) -> torch.nn.Module:
        from transformers import AutoModelForCausalLM

        model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        return model.eval()

    return load


@pytest.fixture
def reference_greedy() -> Callable[[torch.nn.Module, Sequence[int], int], list[int]]:
    """A function (model, prompt, n) -> the n tokens that transformers generates greedily."""

    def generate(model: torch.nn.Module, prompt: Sequence[int], num_tokens: int) -> list[int]:
        tokens = list(prompt)
        with torch.inference_mode():
            for _ in range(num_tokens):
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        return tokens[len(prompt) :]

    return generate


@pytest.fixture
def random_prompt() -> Callable[[int], list[int]]:
    """A function length -> token ids, the same every time."""

    def make(length: int) -> list[int]:
        generator = torch.Generator().manual_seed(length)
        return torch.randint(0, 290, (length,), generator=generator).tolist()

    return make
