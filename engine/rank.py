"""One rank's part of every step, the same on rank 0 and on all others.

A step: block copies; hidden states from the stage before, or the embedding; this stage's layers; hidden states to the
next stage, or, on the last, logits of the wanted rows. All TP ranks of a stage run the same operators, in one order.

``follow`` is the life of a rank other than 0: it takes steps from the control channel until that is closed, and
answers with marks: ``LAYERS`` when a layer group's KV is written, ``LOGITS`` before logits leave for rank 0, ``DONE``
when nothing of the step can write any more. An error ends it: its process dies, and the worker with it.
"""

from __future__ import annotations

import enum
import struct
from collections import deque
from collections.abc import Iterator
from typing import NoReturn

import torch

from twinpool.engine.channel import Channel
from twinpool.engine.parallel import ParallelContext
from twinpool.engine.ports import ReadyEvent
from twinpool.engine.rank_step import RankStep
from twinpool.engine.runner import ModelRunner, OnGroup, await_event
from twinpool.kernels.host_copy import to_device

_MARK = struct.Struct("<BII")


class Mark(enum.IntEnum):
    """What a rank tells rank 0 during a step; ``LAYERS`` has a range of the model's layers."""

    LAYERS = 1
    LOGITS = 2
    DONE = 3

    def encode(self, start: int = 0, end: int = 0) -> bytes:
        """The message."""
        return _MARK.pack(self, start, end)

    @classmethod
    def decode(cls, message: bytes) -> tuple[Mark, int, int]:
        """Mark and layers."""
        mark, start, end = _MARK.unpack(message)
        return cls(mark), start, end


class Rank:
    """Runs steps on this rank's shard."""

    def __init__(self, runner: ModelRunner, parallel: ParallelContext, num_layers: int, hidden_size: int) -> None:
        self.runner = runner
        self.parallel = parallel
        self.layers = parallel.layers(num_layers)
        self._hidden_size = hidden_size

    def forward(self, step: RankStep, on_group: OnGroup | None) -> torch.Tensor:
        """Copies, layers and hand-over; returns what this stage made of the batch, ``[T, hidden]``.

        ``on_group`` gets layers of the model.
        """
        runner, parallel = self.runner, self.parallel
        runner.cache.copy(step.copies)
        if step.batch is None:
            return torch.empty(0)
        received = None
        if not parallel.first_stage:
            shape = (step.batch.num_tokens, self._hidden_size)
            received = parallel.peers.receive(shape, runner.dtype, parallel.rank - parallel.tp_size)
        first = self.layers[0]

        def of_model(start: int, end: int, event: ReadyEvent) -> None:
            if on_group is not None:
                on_group(first + start, first + end, event)

        batch = step.batch.on(runner.device)
        groups = -(-step.layer_groups // parallel.pp_size)
        hidden = runner.forward(batch, groups, of_model, received)
        if not parallel.last_stage:
            parallel.peers.send(hidden, parallel.rank + parallel.tp_size)
        return hidden

    def logits(self, step: RankStep, hidden: torch.Tensor) -> Iterator[torch.Tensor]:
        """On the last stage, with the result of ``forward``: logits of the sampled rows, if any, then of each range of
        ``prompt_rows``: ``[rows, vocab]``, float32. All ranks of the stage must take all of them.
        """
        if step.batch is None:
            return
        if step.batch.num_sample_rows:
            # Rows ascend, so as many as there are hidden states are all of them: the case of every decode step.
            if step.batch.num_sample_rows < len(hidden):
                hidden_rows = hidden.index_select(0, to_device(step.batch.sample_rows, hidden.device))
            else:
                hidden_rows = hidden
            yield self.runner.logits(hidden_rows)
        for start, end in step.prompt_rows:
            yield self.runner.logits(hidden[start:end])


@torch.inference_mode()
def follow(rank: Rank, channel: Channel) -> NoReturn:
    """Runs steps until rank 0 closes the channel.

    Raises:
        ChannelClosed: always, in the end.
    """
    sends_logits = rank.parallel.last_stage and rank.parallel.tp_rank == 0 and not rank.parallel.first_stage
    launched: deque[tuple[int, int, ReadyEvent]] = deque()

    def on_group(start: int, end: int, event: ReadyEvent) -> None:
        launched.append((start, end, event))
        while launched and launched[0][2].query():
            start, end, _ = launched.popleft()
            channel.send(Mark.LAYERS.encode(start, end))

    while True:
        step = RankStep.decode(channel.receive())
        hidden = rank.forward(step, on_group if step.announces else None)
        if rank.parallel.last_stage:
            for logits in rank.logits(step, hidden):
                if sends_logits:
                    channel.send(Mark.LOGITS.encode())
                    rank.parallel.results.send(logits, 0)
        while launched:
            start, end, event = launched.popleft()
            await_event(event)
            channel.send(Mark.LAYERS.encode(start, end))
        rank.runner.synchronize()
        channel.send(Mark.DONE.encode())
