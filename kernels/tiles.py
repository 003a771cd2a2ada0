"""Tiles of the attention kernels: what each takes by default, and the candidates among which ``tile_tuning`` chooses.

Every candidate fits shared memory and spills nothing on all targets, for every model that has more than one (see
``aot`` and the table in docs/performance.md); the first one is the default.
"""

from __future__ import annotations

from dataclasses import dataclass

PROGRAMS_PER_PROCESSOR = (4, 2, 8)
"""A decode program waits for memory most of the time; so many share a processor's shared memory."""


@dataclass(frozen=True, slots=True)
class TileShape:
    """``rows`` (query, head) pairs by ``keys`` of a program; warps and pipeline stages."""

    rows: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """What attention over heads of one size, group and dtype is launched with; None is the default.

    ``decode`` is for batches of as many rows; others, which verify drafts, take the default.
    """

    decode: TileShape | None = None
    prefill: TileShape | None = None
    programs_per_processor: int = PROGRAMS_PER_PROCESSOR[0]
    """Decode programs that a batch is split into, if it has fewer."""

    def of_decode(self, rows: int, dim: int, itemsize: int) -> TileShape:
        """For (query, head) pairs ``rows``, padded head size ``dim`` and values of ``itemsize`` bytes."""
        tuned = self.decode is not None and self.decode.rows == rows
        return self.decode if tuned and self.decode else decode_candidates(rows, dim, itemsize)[0]

    def of_prefill(self, group: int, dim: int, itemsize: int) -> TileShape:
        """For ``group`` query heads per KV head; the rest as in ``of_decode``."""
        return self.prefill or prefill_candidates(group, dim, itemsize)[0]


DEFAULT_TILES = Tiles()


def decode_candidates(rows: int, dim: int, itemsize: int) -> tuple[TileShape, ...]:
    """Tiles of the decode kernel; see ``Tiles.of_decode`` for the arguments."""
    keys = 32 if dim >= 256 or itemsize == 4 else 64
    default = TileShape(rows, keys, 8 if rows * dim >= 8192 else 4, 2 if dim >= 256 else 3)
    if rows > 16 or itemsize == 4:
        return (default,)
    if dim >= 256:
        others = (64, 8, 2), (32, 4, 3), (16, 4, 4)
    elif dim == 128:
        others = (64, 4, 4), (64, 2, 3), (32, 4, 4)
    else:
        others = (128, 4, 3), (64, 2, 3), (32, 4, 4)
    return (default, *(TileShape(rows, *other) for other in others))


def prefill_candidates(group: int, dim: int, itemsize: int) -> tuple[TileShape, ...]:
    """Tiles of the prefill kernel; see ``Tiles.of_prefill`` for the arguments."""
    if itemsize == 4:
        return (TileShape(32, 32, 4, 2),)
    if dim >= 256:
        return TileShape(64, 32, 8, 2), TileShape(32, 32, 4, 2), TileShape(64, 32, 8, 3)
    default = TileShape(128, 64, 8, 3)
    if dim == 128:
        return default, TileShape(128, 32, 8, 3), TileShape(64, 64, 8, 3)
    # With other groups the smaller tile spills.
    smaller = TileShape(64, 64, 4, 3) if group & (group - 1) == 0 else TileShape(128, 32, 8, 3)
    return default, TileShape(128, 32, 4, 3), smaller


@dataclass(frozen=True, slots=True)
class AttentionWorkload:
    """What a rank's attention is timed on: heads of its layers, and steps as its configuration makes them.

    ``window`` is that of the layers with the longest reach. ``batch`` requests of ``context`` keys decode; a prompt is
    computed ``chunk`` tokens at a time.
    """

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    window: int | None
    batch: int
    context: int
    chunk: int

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class Tuning:
    """The winners, and the milliseconds of (default, winner) by kernel. ``whole`` is False if time ran out."""

    tiles: Tiles
    milliseconds: dict[str, tuple[float, float]]
    whole: bool = True
