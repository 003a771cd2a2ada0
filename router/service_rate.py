"""Tokens per second that the pools serve while requests wait for them: what queue times are estimated from."""

from __future__ import annotations

from collections.abc import Callable

_WINDOW_S = 1.0
_SMOOTHING = 0.3


class ServiceRate:
    """Measures over windows of a second or more, and only while the queue is not empty: else it is demand."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began: float | None = None
        self._tokens = 0.0
        self.tokens_per_s: float | None = None
        """None until measured."""

    def queue_is(self, busy: bool) -> None:
        """Whether requests wait now; cheap when nothing changed."""
        if not busy:
            self._began = None
        elif self._began is None:
            self._began, self._tokens = self._clock(), 0.0

    def served(self, tokens: float) -> None:
        """A request ended."""
        if self._began is None:
            return
        self._tokens += tokens
        now = self._clock()
        if now - self._began < _WINDOW_S:
            return
        rate = self._tokens / (now - self._began)
        known = self.tokens_per_s
        self.tokens_per_s = rate if known is None else known + _SMOOTHING * (rate - known)
        self._began, self._tokens = now, 0.0

    def wait_s(self, tokens: float) -> float:
        """Seconds until ``tokens`` are served; 0 while nothing is known."""
        return tokens / self.tokens_per_s if self.tokens_per_s else 0.0
