"""Decode's role in the engine: generate from KV that prefill computed, and keep an even pace."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.engine.request import Request


@dataclass(frozen=True, slots=True)
class DecodePolicy:
    """``local_prefill_budget``: prompt tokens per step (local prompts and recomputation) beside running decodes."""

    local_prefill_budget: int

    @property
    def name(self) -> str:
        """The role."""
        return "decode"

    def reserve_tokens(self, request: Request) -> int:
        """The whole prompt, so that admission is one joint question: does everything running and coming fit?"""
        return request.num_tokens

    def holds(self, request: Request) -> bool:
        """Decode serves its requests to the end."""
        return False

    def loads(self, request: Request) -> bool:
        """Whether the prompt's KV comes from a prefill worker."""
        return request.transfer_id != 0

    def prompt_budget(self, num_decoding: int, max_num_batched_tokens: int) -> int:
        """All of the step while nobody generates, else the configured part of it."""
        return min(self.local_prefill_budget, max_num_batched_tokens) if num_decoding else max_num_batched_tokens
