"""What is left of one step while it is planned: tokens in all, prompt tokens, draft tokens, local admissions."""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.engine.plan import ScheduledRequest


@dataclass(slots=True)
class StepBudget:
    """Made per step, spent per scheduled request; drafts never take the token of a request that generates."""

    tokens: int
    prompt: int
    drafts: int
    admissions: int

    def spend(self, entry: ScheduledRequest, decoding: bool, sign: int = 1) -> None:
        """Takes what ``entry`` computes; ``sign`` -1 gives it back (its request was preempted)."""
        self.tokens -= sign * entry.num_tokens
        if decoding:
            self.drafts -= sign * entry.num_drafts
        else:
            self.prompt -= sign * entry.num_tokens
