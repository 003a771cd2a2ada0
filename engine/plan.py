"""One engine step: what the scheduler asks of the executor, and what comes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from twinpool.engine.ports import ReadyEvent
from twinpool.engine.request import Request, TokenLogprob


@dataclass(slots=True)
class ScheduledRequest:
    """``request`` computes positions ``[request.num_computed_tokens, +num_tokens)`` of prompt + output + draft.

    ``samples`` is true when the last of them is the last known token (no sample for a partial prompt chunk).
    ``num_samples`` is above 1 only for the first token of a request with several choices: one sample per choice.
    ``num_drafts`` of the positions, at the end, are draft tokens to be verified. Not frozen, which would make one per
    request and step cost three times as much; nobody changes it.
    """

    request: Request
    num_tokens: int
    samples: bool
    num_samples: int = 1
    num_drafts: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Work of one step. ``copies`` are (source, target) block pairs to copy, all layers, before anything else.

    ``allowed`` gives, per scheduled request with a grammar (by index in ``scheduled``), an int32 bitmask
    ``[rows, ceil(vocab / 32)]``: one row per sampled position (1 + num_drafts), bit 1 = allowed.
    """

    step: int
    scheduled: Sequence[ScheduledRequest]
    copies: Sequence[tuple[int, int]] = ()
    allowed: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class Sampled:
    """Tokens sampled for one scheduled request, in order; ``logprobs`` runs beside them if wanted.

    With ``num_samples`` > 1, ``token_ids[i]`` belongs to choice ``request.choice + i``; otherwise they follow each
    other (accepted drafts and the token after them; one without drafts). ``prompt_logprobs`` covers the prompt
    positions this step completed (token at position p, for p ≥ 1), if wanted.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(slots=True)
class StepResult:
    """Aligned with ``StepPlan.scheduled``; entries that sampled nothing have no tokens."""

    sampled: list[Sampled]


OnLayers = Callable[[int, int, int, ReadyEvent], None]
"""Called with (rank, start, end, event) after that rank launched layers ``[start, end)`` of the model for the step; the
event proves that the rank's part of their KV is written."""


class Executor(Protocol):
    """Runs steps on all ranks of one worker, in the order of their launch. Called on the engine thread only."""

    @property
    def num_blocks(self) -> int:
        """KV blocks in the region, block 0 (the null block) included."""

    @property
    def rank_layers(self) -> Sequence[tuple[int, int]]:
        """Layers ``[start, end)`` of the model whose KV each rank holds (its share of heads), by rank."""

    @property
    def max_in_flight(self) -> int:
        """Steps that may be launched and not collected: one per pipeline stage."""

    def launch(self, plan: StepPlan, layer_groups: int, on_layers: OnLayers | None) -> None:
        """Starts a step behind those in flight; its requests must be in none of them, and stay as they are until it is
        collected. At most ``max_in_flight`` steps are in flight.

        ``on_layers`` is called for each rank, in layer order, until the step is collected; the model is cut into about
        ``layer_groups`` groups. What fails is told by ``collect``.

        Raises:
            RanksLost: ranks died or no longer agree.
        """

    def collect(self) -> StepResult:
        """Waits for the oldest step in flight: when it returns or raises, no rank writes for it any more.

        Raises:
            RanksLost: ranks died or no longer agree. Any other error means that this step failed, its copies perhaps
                too if no other is in flight; the executor stays usable, and later steps are not touched.
        """

    def close(self) -> None:
        """Frees the model; no step can run any more. Idempotent."""
