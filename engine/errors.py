"""What an engine refuses while it starts; processes translate these for their users."""

from __future__ import annotations


class UnsupportedModel(ValueError):
    """The model, or something in its files, is not supported or is broken; says what, and what to do."""


class RanksLost(RuntimeError):
    """Ranks of this worker died or are no longer in step; the worker's process must end."""


class DoesNotFit(ValueError):
    """The wanted context length or KV size does not fit the model or the memory; says both sizes."""
