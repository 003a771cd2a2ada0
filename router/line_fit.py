"""Seconds as a straight line over an amount (tokens, streams): fitted from measurements, which are slowly forgotten.

Least squares of the relative error: minimises the sum of ((seconds - fixed - per_unit * units) / (units + scale))^2,
so that ten small requests say as much about the fixed part as ten large ones about the slope. Each measurement takes
a tenth of the weight of the earlier ones, and all of it halves every ``HALF_LIFE_S``: a few requests are enough to
learn, and a figure that is not measured any more drifts back to what its background says.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

KEEP = 0.9
HALF_LIFE_S = 120.0
_LEAST_PER_UNIT_S = 1e-9


@dataclass(frozen=True, slots=True)
class Line:
    """``fixed_s`` + ``per_unit_s`` x units."""

    fixed_s: float
    per_unit_s: float

    def at(self, units: float) -> float:
        """Seconds for so many units."""
        return self.fixed_s + self.per_unit_s * units


@dataclass(frozen=True, slots=True)
class Sums:
    """Normal equations of measurements; ``count`` is their weight."""

    count: float = 0.0
    ff: float = 0.0
    fu: float = 0.0
    uu: float = 0.0
    fs: float = 0.0
    us: float = 0.0

    def plus(self, other: Sums, factor: float = 1.0) -> Sums:
        """Both together, the other with its weight times ``factor``."""
        return Sums(
            self.count + factor * other.count,
            self.ff + factor * other.ff,
            self.fu + factor * other.fu,
            self.uu + factor * other.uu,
            self.fs + factor * other.fs,
            self.us + factor * other.us,
        )

    def scaled_to(self, count: float) -> Sums:
        """The same with the weight of ``count`` measurements; nothing stays nothing."""
        return Sums().plus(self, count / self.count) if self.count > 0 else self

    def level(self, shape: Line) -> float:
        """The factor that brings ``shape`` closest to the measurements; 1 where there are none."""
        fixed, per_unit = shape.fixed_s, shape.per_unit_s
        size = fixed * fixed * self.ff + 2 * fixed * per_unit * self.fu + per_unit * per_unit * self.uu
        return (fixed * self.fs + per_unit * self.us) / size if size > 0 else 1.0

    def slowed(self, factor: float) -> Sums:
        """The same measurements, had all taken ``factor`` times as long."""
        return replace(self, fs=factor * self.fs, us=factor * self.us)

    def line(self) -> Line:
        """The best line with neither part negative. The sums must hold something."""
        determinant = self.ff * self.uu - self.fu * self.fu
        if determinant > 1e-12 * self.ff * self.uu:
            fixed = (self.fs * self.uu - self.us * self.fu) / determinant
            per_unit = (self.us * self.ff - self.fs * self.fu) / determinant
            if fixed >= 0 and per_unit >= _LEAST_PER_UNIT_S:
                return Line(fixed, per_unit)
            if fixed >= 0:
                return Line(self.fs / self.ff, _LEAST_PER_UNIT_S)
        return Line(0.0, max(self.us / self.uu, _LEAST_PER_UNIT_S)) if self.uu > 0 else Line(self.fs / self.ff, 0.0)


def measured(units: float, seconds: float, scale: float, weight: float = 1.0) -> Sums:
    """One measurement; ``scale`` are the units below which the fixed part dominates."""
    size = units + scale
    fixed, unit, second = 1 / size, units / size, seconds / size
    return Sums().plus(
        Sums(1.0, fixed * fixed, fixed * unit, unit * unit, fixed * second, unit * second),
        weight,
    )


class LineFit:
    """Measurements of one worker or pair; ``now`` is seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._sums = Sums()
        self._at = 0.0

    def add(self, sums: Sums, now: float) -> None:
        """Takes a measurement."""
        self._sums = Sums().plus(self.sums(now), KEEP).plus(sums)
        self._at = now

    def sums(self, now: float) -> Sums:
        """What is remembered now."""
        age = max(now - self._at, 0.0)
        return Sums().plus(self._sums, 0.5 ** (age / HALF_LIFE_S))
