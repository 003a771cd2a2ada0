"""Size and pace of one engine, resolved: what the worker read from configuration, checkpoint and memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits in tokens unless named otherwise. ``revision`` is the content fingerprint of the weights.

    Raises:
        ValueError: a limit is not positive, or a full batch would not fit the token budget.
    """

    max_model_len: int
    vocab_size: int
    revision: str
    eos_token_ids: frozenset[int] = frozenset()
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    prefill_chunk: int = 512
    prefix_caching: bool = True
    layer_groups: int = 4
    """Announcements per step that finishes a prompt for a decode worker."""
    idle_check_s: float = 1.0
    """An engine idle for so long checks its books, once."""

    def __post_init__(self) -> None:
        limits = {
            "max_model_len": self.max_model_len,
            "vocab_size": self.vocab_size,
            "block_size": self.block_size,
            "max_num_seqs": self.max_num_seqs,
            "prefill_chunk": self.prefill_chunk,
            "layer_groups": self.layer_groups,
        }
        for name, value in limits.items():
            if value < 1:
                raise ValueError(f"{name} must be positive, not {value}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): every running request computes one token per step"
            )
