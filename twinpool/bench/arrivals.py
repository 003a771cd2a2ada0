"""When requests of an open loop start, in seconds from the beginning.

``gamma`` is the usual model (its shape is called burstiness): 1 gives a Poisson process, smaller is burstier, larger is
more even. The offsets are stretched so that n requests take exactly n / rate seconds, and runs can be compared.
"""

from __future__ import annotations

import itertools
import random


def gamma(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """``count`` start times at ``rate`` per second; the first is 0. Raises ValueError: a value is not positive."""
    if rate <= 0 or burstiness <= 0:
        raise ValueError(f"rate ({rate:g}) and burstiness ({burstiness:g}) must be positive")
    draw = random.Random(seed)
    gaps = [draw.gammavariate(burstiness, 1 / (rate * burstiness)) for _ in range(count)]
    times = list(itertools.accumulate(gaps))
    stretch = count / rate / times[-1] if times and times[-1] > 0 else 1.0
    first = times[0] if times else 0.0
    return [(time - first) * stretch for time in times]
