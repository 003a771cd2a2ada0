"""Rotary position embeddings (Su et al., 2021): parameters, and frequencies as ``transformers`` computes them.

Supported kinds: default, linear, dynamic, llama3, yarn. Dynamic NTK scaling changes its frequencies while a sequence
grows past ``max_position_embeddings``, so that keys depend on when they were computed; within that length, which is the
longest this engine accepts, it equals default.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

OPTIONAL: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor", "original_max_position_embeddings"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}
REQUIRED: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor"}),
    "yarn": frozenset({"factor"}),
}


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """Parameters of one kind; those of other kinds keep their defaults. Lengths in tokens."""

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def frequencies(self, dim: int) -> tuple[torch.Tensor, float]:
        """Inverse frequencies, float32 [dim / 2], and the factor on cos and sin."""
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        frequencies = 1.0 / (self.theta**exponents)
        if self.kind == "linear":
            return frequencies / self.factor, 1.0
        if self.kind == "llama3":
            return self._llama3(frequencies), 1.0
        if self.kind == "yarn":
            return self._yarn(dim), self._yarn_attention_factor()
        return frequencies, 1.0

    def _llama3(self, frequencies: torch.Tensor) -> torch.Tensor:
        """Llama 3.1: long wavelengths are scaled, short ones kept, those between interpolated."""
        length = self.original_max_positions
        low, high = self.low_freq_factor, self.high_freq_factor
        wavelengths = 2 * math.pi / frequencies
        scaled = torch.where(wavelengths > length / low, frequencies / self.factor, frequencies)
        smooth = (length / wavelengths - low) / (high - low)
        smoothed = (1 - smooth) * scaled / self.factor + smooth * scaled
        between = (wavelengths >= length / high) & (wavelengths <= length / low)
        return torch.where(between, smoothed, scaled)

    def _yarn(self, dim: int) -> torch.Tensor:
        """YaRN (Peng et al., 2023), equation 23: a ramp between interpolation and extrapolation."""

        def dimension(rotations: float) -> float:
            ratio = self.original_max_positions / (rotations * 2 * math.pi)
            return (dim * math.log(ratio)) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        if low == high:
            high += 0.001
        ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        powers = self.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        keep = 1 - ramp
        return 1.0 / (self.factor * powers) * (1 - keep) + 1.0 / powers * keep

    def _yarn_attention_factor(self) -> float:
        def mscale(scale: float, weight: float = 1.0) -> float:
            return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return mscale(self.factor, self.mscale) / mscale(self.factor, self.mscale_all_dim)
        return mscale(self.factor)


def read_rope(config: Mapping[str, Any], max_positions: int) -> RopeParameters:
    """Reads ``rope_parameters`` (transformers 5) or ``rope_scaling`` and ``rope_theta`` (before).

    Raises:
        ValueError: an unknown kind or key, or a missing one.
    """
    raw = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(raw, dict):
        raise ValueError(f"rope parameters should be an object, not {raw!r}")
    values = {key: value for key, value in raw.items() if value is not None}
    kind = values.pop("rope_type", values.pop("type", "default"))
    values.pop("type", None)
    theta = values.pop("rope_theta", config.get("rope_theta") or 10000.0)
    if values.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial rotary embeddings are not supported")
    if kind not in OPTIONAL:
        raise ValueError(f"rope type {kind!r} is not supported; supported are {', '.join(OPTIONAL)}")
    if unknown := values.keys() - OPTIONAL[kind]:
        raise ValueError(f"unknown rope parameters for type {kind}: {', '.join(sorted(unknown))}")
    if missing := REQUIRED[kind] - values.keys():
        raise ValueError(f"rope type {kind} lacks {', '.join(sorted(missing))}")
    original = config.get("original_max_position_embeddings") or values.pop("original_max_position_embeddings", None)
    values.pop("original_max_position_embeddings", None)
    return RopeParameters(
        kind=kind, theta=float(theta), original_max_positions=int(original or max_positions), **values
    )
