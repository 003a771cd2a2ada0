"""Prefill's role in the engine: compute prompts, hold their KV for a decode worker."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.engine.request import Request


@dataclass(frozen=True, slots=True)
class PrefillPolicy:
    """Requests with a transfer are held after their first token; others are served to the end."""

    @property
    def name(self) -> str:
        """The role."""
        return "prefill"

    def reserve_tokens(self, request: Request) -> int:
        """The whole prompt: a started prefill always ends, and what it announced stays."""
        return request.num_tokens

    def holds(self, request: Request) -> bool:
        """Whether a decode worker will fetch the KV."""
        return request.transfer_id != 0

    def loads(self, request: Request) -> bool:
        """Prefill computes all of its prompts."""
        return False

    def prompt_budget(self, num_decoding: int, max_num_batched_tokens: int) -> int:
        """Prompts are what this pool is for: no limit beside the token budget."""
        return max_num_batched_tokens
