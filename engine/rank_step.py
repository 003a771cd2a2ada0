"""What every rank must know of a step, and its compact form on the control channel: a few integers and the flat batch.

Rank 0 builds it from the plan; requests never leave rank 0. Integers travel as 32 bits where all of them fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twinpool.engine.batch import HostBatch

_WIDE = 1 << 31


@dataclass(frozen=True, slots=True)
class RankStep:
    """``copies`` come first. ``batch`` is None if there is nothing else to do.

    ``prompt_rows`` are ranges of rows whose logits are wanted beside the sampled ones. With ``announces`` rank 0 wants
    to know when each of ``layer_groups`` layer groups is written.
    """

    copies: Sequence[tuple[int, int]] = ()
    batch: HostBatch | None = None
    layer_groups: int = 1
    announces: bool = False
    prompt_rows: Sequence[tuple[int, int]] = ()

    def encode(self) -> tuple[bytes, memoryview]:
        """Header and body of the message."""
        sizes = () if self.batch is None else self.batch.sizes
        flat = np.zeros(0, np.int64) if self.batch is None else self.batch.flat
        pairs = np.array([*self.copies, *self.prompt_rows], np.int64).reshape(-1)
        body: npt.NDArray[np.int64] | npt.NDArray[np.int32] = np.concatenate((pairs, flat))
        wide = bool(body.size) and int(body.max()) >= _WIDE
        if not wide:
            body = body.astype(np.int32)
        counts = len(self.copies), len(self.prompt_rows), len(sizes)
        numbers = (wide, self.layer_groups, self.announces, *counts, *sizes)
        return np.array((len(numbers), *numbers), np.int64).tobytes(), memoryview(body.tobytes())

    @classmethod
    def decode(cls, message: bytes) -> RankStep:
        """The inverse of ``encode``."""
        count = int(np.frombuffer(message, np.int64, 1)[0])
        header = np.frombuffer(message, np.int64, count, 8).tolist()
        wide, layer_groups, announces, num_copies, num_prompt_rows, num_sizes = header[:6]
        body = np.frombuffer(message, np.int64 if wide else np.int32, offset=8 * (1 + count)).astype(np.int64)
        pairs = body[: 2 * (num_copies + num_prompt_rows)].reshape(-1, 2).tolist()
        copies = [(source, target) for source, target in pairs[:num_copies]]
        prompt_rows = [(start, end) for start, end in pairs[num_copies:]]
        batch = None
        if num_sizes:
            batch = HostBatch(body[2 * (num_copies + num_prompt_rows) :], tuple(header[6:]))
        return cls(copies, batch, layer_groups, bool(announces), prompt_rows)
