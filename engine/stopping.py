"""When a choice ends inside the engine. Stop strings are the router's; masking before min_tokens the sampler's."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.engine.request import FinishReason, StopParams


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a choice ended; ``stop_token_id`` is the EOS or stop token that did it (it stays in the output)."""

    reason: FinishReason
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class StopRules:
    """What holds for every request of an engine: its EOS ids and its longest prompt plus answer, in tokens."""

    eos_token_ids: frozenset[int]
    max_model_len: int

    def check(self, stop: StopParams, token_id: int, num_outputs: int, num_tokens: int) -> Ending | None:
        """Whether ``token_id`` ends the choice; called after each single token, accepted drafts included.

        ``num_outputs`` (earlier attempts' tokens count) and ``num_tokens`` (prompt plus output) include the token.
        """
        if num_outputs >= stop.min_tokens:
            is_eos = token_id in self.eos_token_ids and not stop.ignore_eos
            if is_eos or token_id in stop.stop_token_ids:
                return Ending(FinishReason.STOP, token_id)
        if num_outputs >= stop.max_tokens or num_tokens >= self.max_model_len:
            return Ending(FinishReason.LENGTH)
        return None
