"""One dispatch of a request to a pair of workers, or to a decode worker alone.

An attempt is made by its flow, registered with both sessions under one random id, and ended exactly once: by the
workers (all choices finished), or by the flow (``cancel``: both workers are told).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from twinpool.router.choice import Choice
from twinpool.router.messages import Failure, Output, Role, Stats, Submission
from twinpool.router.policy import Route
from twinpool.router.request import ResolvedRequest
from twinpool.router.worker_session import WorkerSession


@dataclass(slots=True, eq=False)
class Attempt:
    """See the module docstring; ``transfer_id`` is 0 without a prefill worker."""

    attempt_id: int
    transfer_id: int
    choices: tuple[int, ...]
    base: dict[int, int]
    """Per choice, the output tokens known when it was submitted."""
    route: Route
    decode: WorkerSession
    prefill: WorkerSession | None
    submitted: float = 0.0
    """On the clock of ``Routing``."""
    loaded: bool = False
    ended: bool = False
    prefilled: set[int] = field(default_factory=set)
    """Choices whose first token came from the prefill worker."""
    prompt_logprobs: dict[int, int] = field(default_factory=dict)
    """Prompt logprobs received, per choice."""
    stats: dict[tuple[Role, int], Stats] = field(default_factory=dict)

    @property
    def awaits_prefill_stats(self) -> bool:
        """Whether the prefill worker still owes its account."""
        if self.prefill is None or self.ended or not self.prefill.usable:
            return False
        return ("prefill", self.choices[0]) not in self.stats

    def was_running_on(self, role: Role) -> bool:
        """Whether the request may be what killed the worker: one that only waited there is beyond suspicion."""
        if role == "prefill":
            return not self.prefilled.issuperset(self.choices)
        return self.loaded or self.prefill is None

    def is_first_account(self, role: Role) -> bool:
        """Whether nothing has come from that worker yet."""
        return not any(known == role for known, _ in self.stats)

    def stats_of(self, role: Role) -> Stats | None:
        """What one worker did: the account of its first choice, which did the work that the others share."""
        return min(((choice, s) for (r, choice), s in self.stats.items() if r == role), default=(0, None))[1]

    def cancel(self) -> None:
        """Ends the attempt on both workers. Idempotent."""
        if not self.ended:
            self.ended = True
            self.decode.cancel(self.attempt_id)
            if self.prefill is not None:
                self.prefill.cancel(self.attempt_id)

    def close(self) -> None:
        """Drops an attempt that the workers have ended. Idempotent."""
        if not self.ended:
            self.ended = True
            self.decode.forget(self.attempt_id)
            if self.prefill is not None:
                self.prefill.forget(self.attempt_id)


@dataclass(frozen=True, slots=True)
class Leg:
    """An attempt at one worker: the sink that its session feeds."""

    attempt: Attempt
    role: Role
    output: Callable[[Attempt, Role, Output], None]
    failed: Callable[[Attempt, Role, Failure], None]
    lost: Callable[[Attempt, Role, str, bool], None]

    def on_output(self, output: Output) -> None:
        """See ``AttemptSink``."""
        self.output(self.attempt, self.role, output)

    def on_failed(self, failure: Failure) -> None:
        """See ``AttemptSink``."""
        self.failed(self.attempt, self.role, failure)

    def on_loaded(self) -> None:
        """See ``AttemptSink``."""
        self.attempt.loaded = True

    def on_session_end(self, reason: str, crashed: bool) -> None:
        """See ``AttemptSink``."""
        self.lost(self.attempt, self.role, reason, crashed)


def submission_for(attempt: Attempt, request: ResolvedRequest, first: Choice, remaining_s: float) -> Submission:
    """What both workers are told; ``first`` is the state of the attempt's first choice, ``remaining_s`` what is left.

    Output of earlier attempts goes along only when one choice is asked for: choices are continued one by one.
    """
    prompt_logprobs = request.prompt_logprobs if first.owes_prompt_logprobs else None
    return Submission(
        attempt_id=attempt.attempt_id,
        request_id=request.request_id,
        prompt_ids=request.prompt_ids,
        output_ids=first.token_ids if len(attempt.choices) == 1 else (),
        sampling=request.sampling,
        n=len(attempt.choices),
        first_choice=attempt.choices[0],
        stopping=request.stopping,
        constraint=request.constraint,
        logprobs=request.logprobs,
        prompt_logprobs=prompt_logprobs,
        priority=request.priority,
        cache_salt=request.cache_salt,
        deadline_s=max(remaining_s, 0.001),
        transfer_id=attempt.transfer_id,
        prefill_worker="" if attempt.route.prefill is None else attempt.route.prefill[0],
        prefill_epoch=0 if attempt.route.prefill is None else attempt.route.prefill[1],
    )
