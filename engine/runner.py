"""One rank's forward pass over a flat batch, in layer groups.

The runner owns the model and views the KV cache. After each group it hands out an event that proves the group's KV is
written, so that blocks can travel while later layers run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

import torch

from twinpool.engine.batch import FlatBatch
from twinpool.engine.cuda_graphs import Capture, DecodeGraphs, null_batch
from twinpool.engine.kv_cache import KVCache
from twinpool.engine.layers import Step
from twinpool.engine.ports import ReadyEvent

OnGroup = Callable[[int, int, ReadyEvent], None]
"""Called after layers ``[start, end)`` of the stage were launched; the event proves that their KV is written."""


class Model(Protocol):
    """What a family builds: a forward pass that can stop between layers."""

    @property
    def num_layers(self) -> int:
        """Layers of this rank's stage."""

    def begin(self, batch: FlatBatch, kv: torch.Tensor, hidden: torch.Tensor | None) -> Step:
        """Embeds the batch, or starts from ``hidden`` of the stage before; ``kv`` is ``KVCache.blocks``."""

    def run_layers(self, step: Step, start: int, end: int) -> None:
        """Advances ``step`` through layers ``[start, end)`` and writes their KV."""

    def finish(self, step: Step) -> torch.Tensor:
        """[T, hidden]: the final hidden states, or what the next stage starts from."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[rows, hidden] -> [rows, vocab]``, float32."""


class Written:
    """The event of a device that runs each operator to its end: everything before it has been written."""

    def query(self) -> bool:
        """True."""
        return True


class ModelRunner:
    """Runs a model over a KV cache on one device."""

    def __init__(self, model: Model, cache: KVCache, device: torch.device) -> None:
        self._model = model
        self._graphs: DecodeGraphs | None = None
        self.cache = cache
        self.device = device

    @torch.inference_mode()
    def capture(self, capture: Capture, sizes: Sequence[int], max_blocks: int) -> None:
        """From now on decode steps of up to ``sizes[-1]`` requests of up to ``max_blocks`` blocks replay a capture.

        Runs steps of all kinds in the null block, so that no kernel is left to be compiled when requests come.
        """

        def forward(batch: FlatBatch) -> torch.Tensor:
            step = self._model.begin(batch, self.cache.blocks, None)
            self._model.run_layers(step, 0, self.num_layers)
            return self._model.finish(step)

        forward(null_batch(self.cache.block_size, self.device))
        self._graphs = DecodeGraphs(
            forward,
            capture,
            sizes=sizes,
            max_blocks=max_blocks,
            block_size=self.cache.block_size,
            device=self.device,
        )

    @property
    def num_layers(self) -> int:
        """Layers of this rank."""
        return self._model.num_layers

    def forward(
        self,
        batch: FlatBatch,
        layer_groups: int = 1,
        on_group: OnGroup | None = None,
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes the batch's KV and returns the final hidden states [T, hidden], or the next stage's ``hidden``.

        ``on_group`` is called after each of ``layer_groups`` nearly equal groups (at most one per layer), with layers
        of this stage.
        """
        self.cache.clear(batch.new_blocks)
        if self._graphs is not None and self._graphs.takes(batch):
            result = self._graphs.run(batch)
            if on_group is not None:
                on_group(0, self.num_layers, self.event())
            return result
        step = self._model.begin(batch, self.cache.blocks, hidden)
        for start, end in layer_ranges(self.num_layers, layer_groups):
            self._model.run_layers(step, start, end)
            if on_group is not None:
                on_group(start, end, self.event())
        return self._model.finish(step)

    @property
    def dtype(self) -> torch.dtype:
        """Of hidden states and KV."""
        return self.cache.blocks.dtype

    def synchronize(self) -> None:
        """Returns when everything that was launched has been done."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of rows of ``forward``'s result: [rows, vocab], float32."""
        return self._model.logits(hidden)

    def event(self) -> ReadyEvent:
        """Proves that everything launched so far has been done."""
        if self.device.type != "cuda":
            return Written()
        event = torch.Event(self.device)
        event.record(torch.cuda.current_stream(self.device))
        return event


def await_event(event: ReadyEvent) -> None:
    """Returns when ``event`` has happened."""
    if isinstance(event, torch.Event):
        event.synchronize()


def layer_ranges(num_layers: int, groups: int) -> Sequence[tuple[int, int]]:
    """Splits layers into ``groups`` nearly equal ranges; none is empty, so there are at most ``num_layers``."""
    groups = max(1, min(groups, num_layers))
    bounds = [num_layers * group // groups for group in range(groups + 1)]
    return list(pairwise(bounds))
