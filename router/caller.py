"""Who sends a request, and what it may use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Caller:
    """An API key by its name, never its value; None sets no limit.

    ``weight`` is its share of the pools relative to other callers when not all can be served; ``best_priority`` the
    smallest priority (the most urgent) that its requests may have.
    """

    name: str
    weight: float = 1.0
    max_in_flight: int | None = None
    tokens_per_minute: int | None = None
    best_priority: int = 0


ANYBODY = Caller("", best_priority=-(2**31))
"""Everybody where no keys are configured."""
