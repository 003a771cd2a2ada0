"""Strict loading: every parameter of the model comes from exactly one stored tensor, and none is left over.

1. The model is built once on the meta device, whole, against the checkpoint's names and shapes. Everything missing,
   unknown, misshapen or quantised is told in one error, before a byte of weights is read.
2. It is built again, the part of this rank only; each parameter is read, cast, fused and packed as its layer asks for
   it, so that there is never a second copy of more than one layer.

Layers own their parameters; the loader keeps nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from safetensors import safe_open

from twinpool.engine.checkpoint import DTYPES, Checkpoint
from twinpool.engine.errors import UnsupportedModel
from twinpool.engine.memory import check_room

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) while weights are read."""

RECOMPUTED = ("rotary_emb.inv_freq",)
"""Endings of names that old checkpoints store although they follow from the configuration."""

ModelT = TypeVar("ModelT")


@dataclass(frozen=True, slots=True)
class Shard:
    """Indices ``[start, end)`` along ``dim`` of a stored tensor.

    With ``parts``, ``dim`` is that many equal parts one after the other, as in fused matrices, and the range is taken
    of each.
    """

    dim: int
    start: int
    end: int
    parts: int = 1

    @property
    def size(self) -> int:
        """Length of ``dim`` in the shard."""
        return self.parts * (self.end - self.start)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The shard of a whole tensor; a view if that is possible."""
        shape = tensor.shape
        parts = tensor.view(*shape[: self.dim], self.parts, -1, *shape[self.dim + 1 :])
        return parts.narrow(self.dim + 1, self.start, self.end - self.start).flatten(self.dim, self.dim + 1)


class WeightSource(Protocol):
    """Where layers get their parameters."""

    @property
    def dtype(self) -> torch.dtype:
        """The model's."""

    @property
    def device(self) -> torch.device:
        """Where ``take`` puts tensors."""

    def has(self, name: str) -> bool:
        """Whether the checkpoint stores ``name``."""

    def take(self, name: str, shape: tuple[int, ...], shard: Shard | None) -> torch.Tensor:
        """The stored tensor of (whole) ``shape``, or a shard of it, as a new tensor of the model's dtype and device."""


@dataclass(frozen=True, slots=True)
class Weights:
    """A prefix into a source: ``weights.at("model.layers.0").take("mlp.up_proj.weight", ...)``."""

    source: WeightSource
    prefix: str = ""

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype."""
        return self.source.dtype

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return self.source.device

    def at(self, name: str) -> Weights:
        """The weights below ``name``."""
        return Weights(self.source, f"{self.prefix}{name}.")

    def has(self, name: str) -> bool:
        """Whether ``name`` is stored below the prefix."""
        return self.source.has(self.prefix + name)

    def take(self, name: str, shape: tuple[int, ...], shard: Shard | None = None) -> torch.Tensor:
        """See ``WeightSource.take``."""
        return self.source.take(self.prefix + name, shape, shard)


@dataclass(frozen=True, slots=True)
class Loaded(Generic[ModelT]):
    """A model, and what loading it took: bytes read from the checkpoint, and seconds."""

    model: ModelT
    num_bytes: int
    seconds: float

    @property
    def gb_per_s(self) -> float:
        """Rate of loading, conversion and packing included, in 10^9 bytes per second."""
        return self.num_bytes / max(self.seconds, 1e-9) / 1e9


def load(
    checkpoint: Checkpoint,
    build_whole: Callable[[Weights], object],
    build: Callable[[Weights], ModelT],
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
) -> Loaded[ModelT]:
    """Checks the checkpoint against ``build_whole`` and loads the part that ``build`` takes.

    Raises:
        UnsupportedModel: listing every missing, unknown, misshapen or non-float tensor.
        DoesNotFit: the part is larger than the memory that ``device`` has left.
    """
    started = time.perf_counter()
    check = _Check(checkpoint, dtype)
    build_whole(Weights(check))
    check.finish()
    plan = _Check(checkpoint, dtype)
    build(Weights(plan))
    check_room(plan.model_bytes, device)
    with _Reader(checkpoint, dtype, device, plan.num_bytes, progress) as reader:
        model = build(Weights(reader))
    return Loaded(model, plan.num_bytes, time.perf_counter() - started)


def size_of(checkpoint: Checkpoint, build: Callable[[Weights], object], dtype: torch.dtype) -> int:
    """Bytes of the weights that ``build`` takes; reads none."""
    plan = _Check(checkpoint, dtype)
    build(Weights(plan))
    return plan.model_bytes


class _Check:
    """A source of meta tensors that notes what is wrong."""

    device = torch.device("meta")

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        self._checkpoint = checkpoint
        self.dtype = dtype
        self._taken: set[str] = set()
        self._missing: list[str] = []
        self._wrong: list[str] = []
        self.num_bytes = 0
        self.model_bytes = 0

    def has(self, name: str) -> bool:
        return name in self._checkpoint.entries

    def take(self, name: str, shape: tuple[int, ...], shard: Shard | None) -> torch.Tensor:
        if name in self._taken:
            raise AssertionError(f"two parameters of the model are called {name}")
        self._taken.add(name)
        entry = self._checkpoint.entries.get(name)
        sizes = list(shape)
        if shard is not None:
            sizes[shard.dim] = shard.size
        tensor = torch.empty(sizes, dtype=self.dtype, device=self.device)
        self.model_bytes += tensor.nbytes
        if entry is None:
            self._missing.append(name)
        elif entry.dtype not in DTYPES:
            self._wrong.append(f"{name} is stored as {entry.dtype}")
        elif entry.shape != shape:
            self._wrong.append(f"{name} has shape {list(entry.shape)}, not {list(shape)}")
        else:
            self.num_bytes += tensor.numel() * DTYPES[entry.dtype].itemsize
        return tensor

    def finish(self) -> None:
        unknown = [
            name for name in self._checkpoint.entries if name not in self._taken and not name.endswith(RECOMPUTED)
        ]
        problems = [
            f"{what}: {_shorten(names)}"
            for what, names in (("missing", self._missing), ("unknown", unknown), ("wrong", self._wrong))
            if names
        ]
        if problems:
            raise UnsupportedModel(
                f"the weights in {self._checkpoint.folder} do not match its config.json: {'; '.join(problems)}"
            )


def _shorten(names: Sequence[str]) -> str:
    """At most 20 names, and how many more there are."""
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")


class _Reader:
    """A source that reads. Files stay mapped until the end of the ``with``; every tensor given out is a copy."""

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, total: int, progress: Progress | None
    ) -> None:
        self._checkpoint = checkpoint
        self.dtype = dtype
        self.device = device
        self._total = total
        self._done = 0
        self._progress = progress
        self._stack = ExitStack()
        self._files = {file: self._stack.enter_context(safe_open(file, framework="pt")) for file in checkpoint.files}

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()
        self._stack.close()

    def has(self, name: str) -> bool:
        return name in self._checkpoint.entries

    def take(self, name: str, shape: tuple[int, ...], shard: Shard | None) -> torch.Tensor:
        stored = self._files[self._checkpoint.entries[name].file].get_tensor(name)
        part = stored if shard is None else shard.of(stored)
        tensor: torch.Tensor = part.to(device=self.device, dtype=self.dtype, copy=True)
        self._done += part.numel() * part.element_size()
        if self._progress is not None:
            self._progress(self._done, self._total)
        return tensor
