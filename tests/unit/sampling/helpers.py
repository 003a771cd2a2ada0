"""Requests and schedules for sampler tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from twinpool.engine.plan import Sampled, ScheduledRequest
from twinpool.engine.request import Request, SamplingParams, StopParams
from twinpool.engine.sampler import Sampler
from twinpool.kernels.choice import KernelName

CPU = torch.device("cpu")
EOS = 2
kernels: KernelName = "auto"
"""What samplers are made with; ``conftest`` runs most tests with both."""


def make_request(
    sampling: SamplingParams | None = None,
    prompt: Sequence[int] = (1,),
    output: Sequence[int] = (),
    drafts: Sequence[int] = (),
    stop: StopParams | None = None,
    choice: int = 0,
) -> Request:
    return Request(
        attempt_id=7,
        prompt_ids=list(prompt),
        sampling=sampling or SamplingParams(temperature=0),
        stop=stop or StopParams(max_tokens=100),
        choice=choice,
        output_ids=list(output),
        draft_ids=list(drafts),
    )


def schedule(request: Request, num_samples: int = 1) -> ScheduledRequest:
    num_drafts = len(request.draft_ids)
    return ScheduledRequest(request, 1 + num_drafts, True, num_samples=num_samples, num_drafts=num_drafts)


def make_sampler(vocab_size: int, stop_ids: Sequence[int] = (EOS,)) -> Sampler:
    return Sampler(vocab_size, frozenset(stop_ids), CPU, kernels)


def sample_one(
    logits: Tensor,
    request: Request,
    allowed: Tensor | None = None,
    num_samples: int = 1,
    sampler: Sampler | None = None,
) -> Sampled:
    sampler = sampler or make_sampler(logits.shape[-1])
    [sampled] = sampler.sample(logits, [schedule(request, num_samples)], [allowed])
    return sampled


def mask_of(rows: Sequence[set[int]], vocab_size: int) -> Tensor:
    bits = np.zeros((len(rows), (vocab_size + 31) // 32 * 32), dtype=np.uint8)
    for row, tokens in zip(bits, rows, strict=True):
        row[list(tokens)] = 1
    return torch.from_numpy(np.packbits(bits, axis=-1, bitorder="little").view(np.int32).copy())


def seeded(sampling: SamplingParams, seed: int) -> SamplingParams:
    return replace(sampling, seed=seed)
