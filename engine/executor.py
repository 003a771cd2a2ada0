"""The inline executor: one rank, in the caller's process and thread. It holds no scheduler state.

1. ``build_inline_executor`` checks the model folder, loads the weights, has the connector allocate the KV region.
2. ``run`` does a step: block copies, flat batch, forward pass, logits of the sampled rows only, sampling.
3. ``close`` drops the model. The region belongs to the connector, which frees it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from twinpool.engine.batch import build_batch, prompt_rows
from twinpool.engine.checkpoint import Checkpoint
from twinpool.engine.errors import DoesNotFit, UnsupportedModel
from twinpool.engine.kv_cache import KVCache
from twinpool.engine.loader import Loaded, Progress, Weights, load
from twinpool.engine.model_config import ModelConfig
from twinpool.engine.models.decoder import Decoder
from twinpool.engine.models.registry import FAMILIES
from twinpool.engine.parallel import ParallelContext
from twinpool.engine.plan import OnLayers, Sampled, ScheduledRequest, StepPlan, StepResult
from twinpool.engine.request import TokenLogprob
from twinpool.engine.runner import ModelRunner
from twinpool.kernels.reference import ReferenceKernels
from twinpool.kv_transfer.layout import DTYPES, KVLayout, RankLayout

PROMPT_LOGPROB_ROWS = 128
"""Rows of prompt logits in memory at once: a vocabulary of 152k takes 600 kB per row."""

CPU_KV_BYTES = 1 << 30
CUDA_KV_SHARE = 0.85

Allocate = Callable[[int, torch.device], torch.Tensor]
"""A connector's ``allocate``: bytes and device in, flat uint8 region out."""


class StepSampler(Protocol):
    """Turns logits into tokens."""

    def sample(
        self,
        logits: torch.Tensor,
        scheduled: Sequence[ScheduledRequest],
        allowed: Sequence[torch.Tensor | None],
    ) -> list[Sampled]:
        """One ``Sampled`` per entry of ``scheduled``.

        ``logits`` [rows, vocab], float32, holds 1 + num_drafts rows per entry, in order; it may be overwritten.
        ``allowed`` are the entries' grammar bitmasks.
        """

    def prompt_logprobs(self, logits: torch.Tensor, token_ids: Sequence[int], top: int) -> list[TokenLogprob]:
        """The log-probability of ``token_ids[i]`` under row i of ``logits``, with ``top`` alternatives."""


MakeSampler = Callable[[int, frozenset[int], torch.device], StepSampler]
"""Makes a sampler from vocabulary size, end-of-sequence ids and device."""


class InlineExecutor:
    """Implements ``Executor`` on one device."""

    def __init__(self, runner: ModelRunner, sampler: StepSampler, vocab_size: int) -> None:
        self._runner: ModelRunner | None = runner
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._num_blocks = runner.cache.num_blocks
        self._num_layers = runner.num_layers

    @property
    def num_blocks(self) -> int:
        """KV blocks, the null block included."""
        return self._num_blocks

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self._num_layers

    def close(self) -> None:
        """Drops model and region view. Idempotent."""
        self._runner = None

    @torch.inference_mode()
    def run(self, plan: StepPlan, layer_groups: int, on_layers: OnLayers | None) -> StepResult:
        """See ``Executor.run``. With fewer layers than ``layer_groups``, ``on_layers`` is called once per layer.

        Raises:
            ValueError: the plan names tokens or blocks that do not exist; nothing but ``copies`` was done.
            RuntimeError: the executor is closed.
        """
        runner = self._runner
        if runner is None:
            raise RuntimeError("the executor is closed")
        runner.cache.copy(plan.copies)
        result = StepResult([Sampled() for _ in plan.scheduled])
        if not plan.scheduled:
            return result
        batch = build_batch(
            plan.scheduled,
            block_size=runner.cache.block_size,
            num_blocks=self._num_blocks,
            vocab_size=self._vocab_size,
            device=runner.device,
        )
        hidden = runner.forward(batch, layer_groups, on_layers)
        sampling = [index for index, item in enumerate(plan.scheduled) if item.samples]
        if sampling:
            logits = runner.logits(hidden.index_select(0, batch.sample_rows))
            scheduled = [plan.scheduled[index] for index in sampling]
            allowed = [plan.allowed.get(index) for index in sampling]
            for index, sampled in zip(sampling, self._sampler.sample(logits, scheduled, allowed), strict=True):
                result.sampled[index] = sampled
        self._add_prompt_logprobs(runner, plan, hidden, result)
        return result

    def _add_prompt_logprobs(
        self, runner: ModelRunner, plan: StepPlan, hidden: torch.Tensor, result: StepResult
    ) -> None:
        for rows in prompt_rows(plan.scheduled):
            top = plan.scheduled[rows.index].request.sampling.prompt_logprobs or 0
            for start in range(rows.start, rows.end, PROMPT_LOGPROB_ROWS):
                end = min(start + PROMPT_LOGPROB_ROWS, rows.end)
                tokens = rows.token_ids[start - rows.start : end - rows.start]
                logprobs = self._sampler.prompt_logprobs(runner.logits(hidden[start:end]), tokens, top)
                result.sampled[rows.index].prompt_logprobs += logprobs


@dataclass(frozen=True, slots=True)
class BuiltExecutor:
    """An executor that is ready, and the facts that its worker tells others. Lengths in tokens."""

    executor: InlineExecutor
    config: ModelConfig
    layout: KVLayout
    rank_layout: RankLayout
    max_model_len: int
    weight_bytes: int
    load_seconds: float
    gb_per_s: float

    @property
    def num_blocks(self) -> int:
        """KV blocks, the null block included."""
        return self.executor.num_blocks

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a sequence."""
        return self.config.eos_ids

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.config.vocab_size

    @property
    def revision(self) -> str:
        """Identity of the model's content."""
        return self.config.revision


def build_inline_executor(
    model_folder: Path,
    *,
    dtype: str,
    device: torch.device,
    block_size: int,
    allocate: Allocate,
    make_sampler: MakeSampler,
    num_blocks: int | None = None,
    kv_memory_bytes: int | None = None,
    max_model_len: int | None = None,
    progress: Progress | None = None,
) -> BuiltExecutor:
    """Loads a model and allocates its KV.

    ``dtype`` is a name of ``kv_transfer.layout.DTYPES`` or "auto" (the checkpoint's). Without ``num_blocks`` and
    ``kv_memory_bytes``, KV takes 1 GiB on CPU and 85 % of the memory that is left on a GPU. Without
    ``max_model_len``, it is the model's, or what fits the KV if that is less.

    Raises:
        UnsupportedModel: see ``ModelConfig.from_hf`` and ``loader.load``.
        DoesNotFit: an explicit ``max_model_len`` over the model's or the KV's limit, or KV below two blocks.
    """
    config = ModelConfig.from_hf(model_folder)
    if max_model_len is not None and max_model_len > config.max_position_embeddings:
        raise DoesNotFit(f"max_model_len {max_model_len} is over the model's limit of {config.max_position_embeddings}")
    name = config.dtype if dtype == "auto" else dtype
    if name not in DTYPES:
        raise UnsupportedModel(f"dtype {dtype!r} is not supported; use auto, {', '.join(DTYPES)}")
    loaded = _load_decoder(model_folder, config, DTYPES[name], device, progress)
    layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, block_size, name)
    rank_layout = RankLayout.whole(layout)
    if num_blocks is None:
        num_blocks = _kv_bytes(kv_memory_bytes, device) // rank_layout.block_bytes
    if num_blocks < 2:
        raise DoesNotFit(f"{num_blocks} KV blocks of {rank_layout.block_bytes} bytes are too few; give KV more memory")
    capacity = (num_blocks - 1) * block_size
    if max_model_len is not None and max_model_len > capacity:
        raise DoesNotFit(
            f"max_model_len {max_model_len} needs more than the {num_blocks} KV blocks ({capacity} tokens)"
        )
    cache = KVCache(allocate(num_blocks * rank_layout.block_bytes, device), rank_layout)
    runner = ModelRunner(loaded.model, cache, device)
    sampler = make_sampler(config.vocab_size, config.eos_ids, device)
    return BuiltExecutor(
        executor=InlineExecutor(runner, sampler, config.vocab_size),
        config=config,
        layout=layout,
        rank_layout=rank_layout,
        max_model_len=max_model_len or min(config.max_position_embeddings, capacity),
        weight_bytes=loaded.num_bytes,
        load_seconds=loaded.seconds,
        gb_per_s=loaded.gb_per_s,
    )


def _load_decoder(
    folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device, progress: Progress | None
) -> Loaded[Decoder]:
    family = FAMILIES[config.architecture]
    kernels = ReferenceKernels(prepack=True)
    parallel = ParallelContext()

    def build(weights: Weights) -> Decoder:
        return family(weights, config, parallel, kernels)

    return load(Checkpoint.open(folder), build, build, dtype=dtype, device=device, progress=progress)


def _kv_bytes(wanted: int | None, device: torch.device) -> int:
    if wanted is not None:
        return wanted
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * CUDA_KV_SHARE)
    return CPU_KV_BYTES
