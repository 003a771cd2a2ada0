"""The executor: runs steps on rank 0, in the caller's process and thread, and on a worker's other ranks if any.

1. ``build_executor`` checks the model folder, loads the weights, has the connector allocate the KV region. The other
   ranks do the same in their own processes; ``Followers`` says how they are reached.
2. ``launch`` starts a step: the compact plan goes to all ranks, this rank does its part. ``collect`` ends it: logits of
   the sampled rows arrive on rank 0 and are sampled here, and every rank says that it is done. Meanwhile the marks of
   the other ranks come in (see ``rank``), and each rank's written layers are announced. With ``pp_size`` in flight
   every stage has work: this rank computes the next step's first stage before it waits for the last one's logits.
3. ``close`` drops the model. The region belongs to the connector, which frees it; the other ranks end when whoever
   started them closes their channels.

It holds no scheduler state. How ranks are started, and what carries their channels, is not its business.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from twinpool.engine.batch import BatchBuilder, HostBatch, PromptRows, prompt_rows
from twinpool.engine.channel import Channel
from twinpool.engine.errors import DoesNotFit, RanksLost
from twinpool.engine.followers import FollowerMarks, Followers, NoFollowers
from twinpool.engine.loader import Progress
from twinpool.engine.model_config import ModelConfig
from twinpool.engine.plan import OnLayers, Sampled, ScheduledRequest, StepPlan, StepResult
from twinpool.engine.ports import ReadyEvent
from twinpool.engine.rank import Rank
from twinpool.engine.rank_step import RankStep
from twinpool.engine.request import TokenLogprob
from twinpool.engine.runner import await_event
from twinpool.engine.shard import Shard, StepSizes, load_shard
from twinpool.kernels.choice import KernelName
from twinpool.kv_transfer.layout import KVLayout

PROMPT_LOGPROB_ROWS = 128
"""Rows of prompt logits in memory at once: a vocabulary of 152k takes 600 kB per row."""

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


@dataclass(slots=True)
class _Flight:
    """A launched step. ``hidden`` and ``written`` are None if nothing of it runs; ``error`` is for ``collect``."""

    plan: StepPlan
    step: RankStep
    rows: Sequence[PromptRows]
    error: Exception | None
    hidden: torch.Tensor | None = None
    written: ReadyEvent | None = None


class ModelExecutor:
    """Implements ``Executor``; see the module."""

    def __init__(
        self, rank: Rank, sampler: StepSampler, config: ModelConfig, followers: Sequence[Channel] = ()
    ) -> None:
        self._rank: Rank | None = rank
        self._sampler = sampler
        self._vocab_size = config.vocab_size
        self._num_blocks = rank.runner.cache.num_blocks
        self._batches = BatchBuilder(
            block_size=rank.runner.cache.block_size, num_blocks=self._num_blocks, vocab_size=config.vocab_size
        )
        places = [rank.parallel.at(number) for number in range(rank.parallel.size)]
        self._rank_layers = [place.layers(config.num_layers) for place in places]
        self._followers = FollowerMarks(followers)
        self._max_in_flight = rank.parallel.pp_size
        self._flights: deque[_Flight] = deque()

    @property
    def num_blocks(self) -> int:
        """KV blocks, the null block included."""
        return self._num_blocks

    @property
    def rank_layers(self) -> Sequence[tuple[int, int]]:
        """See ``Executor``."""
        return self._rank_layers

    def close(self) -> None:
        """Drops model and region view. Idempotent."""
        self._rank = None

    @property
    def max_in_flight(self) -> int:
        """One step per stage."""
        return self._max_in_flight

    @torch.inference_mode()
    def launch(self, plan: StepPlan, layer_groups: int, on_layers: OnLayers | None) -> None:
        """See ``Executor.launch``; returns when this rank's operators are launched (on a CPU: done).

        A plan that names tokens or blocks that do not exist makes ``collect`` raise ValueError; nothing but its
        ``copies`` is done.

        Raises:
            RanksLost: a rank died, or something failed on this one while others were in the step.
            RuntimeError: the executor is closed.
        """
        rank = self._rank
        if rank is None:
            raise RuntimeError("the executor is closed")
        batch: HostBatch | None = None
        refused: ValueError | None = None
        try:
            batch = self._batches.build(plan.scheduled) if plan.scheduled else None
        except ValueError as error:
            refused = error
        rows = [] if refused else list(_chunks(prompt_rows(plan.scheduled)))
        prompt_ranges = [(chunk.start, chunk.end) for chunk in rows]
        step = RankStep(plan.copies, batch, layer_groups, on_layers is not None, prompt_ranges)
        flight = _Flight(plan, step, rows, refused)
        self._flights.append(flight)
        if batch is None and not plan.copies:
            return
        marks = self._followers

        def on_group(start: int, end: int, event: ReadyEvent) -> None:
            if on_layers is not None:
                on_layers(0, start, end, event)
                marks.take()

        marks.begin(step, on_layers)
        try:
            with self._together():
                flight.hidden = rank.forward(step, on_group)
                flight.written = rank.runner.event()
        except RanksLost:
            raise
        except Exception as error:  # noqa: BLE001 - told by ``collect``, when the steps before have been collected
            flight.error = error

    @torch.inference_mode()
    def collect(self) -> StepResult:
        """See ``Executor.collect``.

        Raises:
            ValueError: see ``launch``.
            RanksLost: as ``launch``.
            RuntimeError: the executor is closed.
        """
        rank = self._rank
        if rank is None:
            raise RuntimeError("the executor is closed")
        flight = self._flights.popleft()
        sampled: list[Sampled] = []
        if flight.hidden is not None and flight.written is not None:
            logits = self._logits(rank, flight.step, flight.hidden)
            try:
                sampled = self._sample(flight.plan, flight.rows, logits)
            except RanksLost:
                raise
            except Exception as error:  # noqa: BLE001 - raised below, when all ranks are done with the step
                flight.error = error
            # Whatever sampling met, all ranks of the last stage compute all logits of the step.
            deque(logits, maxlen=0)
            self._followers.finish()
            await_event(flight.written)
        if flight.error is not None:
            raise flight.error
        return StepResult(sampled)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Other ranks take part in the body: if it fails here, they wait for this rank in vain."""
        try:
            yield
        except Exception as error:
            if self._followers.present:
                raise RanksLost("a step failed on rank 0 while the other ranks were in it") from error
            raise

    def _logits(self, rank: Rank, step: RankStep, hidden: torch.Tensor) -> Iterator[torch.Tensor]:
        """Logits of the sampled rows, if any, then of ``step.prompt_rows``, computed here or on the last stage."""
        parallel = rank.parallel
        if parallel.last_stage:
            own = rank.logits(step, hidden)
            while True:
                with self._together():
                    logits = next(own, None)
                if logits is None:
                    return
                yield logits
        if step.batch is None:
            return
        source = parallel.size - parallel.tp_size
        counts = [step.batch.num_sample_rows] if step.batch.num_sample_rows else []
        for count in counts + [end - start for start, end in step.prompt_rows]:
            with self._together():
                self._followers.wait_logits(source)
                logits = parallel.results.receive((count, self._vocab_size), torch.float32, source)
            yield logits

    def _sample(self, plan: StepPlan, rows: Sequence[PromptRows], logits: Iterator[torch.Tensor]) -> list[Sampled]:
        """One per scheduled request."""
        sampling = [index for index, item in enumerate(plan.scheduled) if item.samples]
        sampled: list[Sampled] = []
        if sampling and (sampled_logits := next(logits, None)) is not None:
            scheduled = [plan.scheduled[index] for index in sampling]
            allowed = [plan.allowed.get(index) for index in sampling]
            sampled = self._sampler.sample(sampled_logits, scheduled, allowed)
        if len(sampled) < len(plan.scheduled):
            by_index = dict(zip(sampling, sampled, strict=False))
            sampled = [by_index.get(index) or Sampled() for index in range(len(plan.scheduled))]
        for chunk, chunk_logits in zip(rows, logits, strict=True):
            top = plan.scheduled[chunk.index].request.sampling.prompt_logprobs or 0
            logprobs = self._sampler.prompt_logprobs(chunk_logits, chunk.token_ids, top)
            sampled[chunk.index].prompt_logprobs += logprobs
        return sampled


def _chunks(rows: Sequence[PromptRows]) -> Iterator[PromptRows]:
    for item in rows:
        for start in range(item.start, item.end, PROMPT_LOGPROB_ROWS):
            end = min(start + PROMPT_LOGPROB_ROWS, item.end)
            yield PromptRows(item.index, start, end, item.token_ids[start - item.start : end - item.start])


@dataclass(frozen=True, slots=True)
class BuiltExecutor:
    """An executor that is ready, and the facts that its worker tells others. Lengths in tokens."""

    executor: ModelExecutor
    shard: Shard
    max_model_len: int

    @property
    def config(self) -> ModelConfig:
        """The model's."""
        return self.shard.config

    @property
    def layout(self) -> KVLayout:
        """KV of the whole model."""
        return self.shard.layout

    @property
    def num_blocks(self) -> int:
        """KV blocks, the null block included."""
        return self.executor.num_blocks


def build_executor(
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
    kernels: KernelName = "auto",
    tuned_for: StepSizes | None = None,
    progress: Progress | None = None,
    followers: Followers | None = None,
) -> BuiltExecutor:
    """Loads rank 0 of a model and allocates its KV; sizes as in ``Shard.fitting_blocks``, per rank.

    Without ``max_model_len``, it is the model's, or what fits the KV if that is less.

    Raises:
        UnsupportedModel: see ``load_shard``.
        DoesNotFit: see ``load_shard`` and ``Shard.fitting_blocks``; or an explicit ``max_model_len`` over the model's
            or the KV's limit.
    """
    followers = followers or NoFollowers()
    config = ModelConfig.from_hf(model_folder)
    if max_model_len is not None and max_model_len > config.max_position_embeddings:
        limit = config.max_position_embeddings
        raise DoesNotFit(f"max_model_len {max_model_len} is over the model's limit of {limit}; set that or less")
    shard = load_shard(
        model_folder,
        dtype=dtype,
        device=device,
        block_size=block_size,
        parallel=followers.parallel,
        kernels=kernels,
        tuned_for=tuned_for,
        progress=progress,
    )
    num_blocks = followers.agree(shard.fitting_blocks(num_blocks, kv_memory_bytes))
    capacity = (num_blocks - 1) * block_size
    if max_model_len is not None and max_model_len > capacity:
        raise DoesNotFit(
            f"max_model_len {max_model_len} needs more than the {num_blocks} KV blocks ({capacity} tokens)"
        )
    rank = shard.rank(allocate(num_blocks * shard.rank_layout.block_bytes, device))
    sampler = make_sampler(config.vocab_size, config.eos_ids, device)
    return BuiltExecutor(
        executor=ModelExecutor(rank, sampler, config, followers.channels),
        shard=shard,
        max_model_len=max_model_len or min(config.max_position_embeddings, capacity),
    )
