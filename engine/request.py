"""A request inside one engine, its arithmetic and its states.

Life cycle:

1. ``WAITING``: submitted, holds no blocks (or lost them to preemption).
2. ``LOADING``: owns all blocks of its prompt; the exchange reads remote KV into them. Owner: the request.
3. ``RUNNING``: part of the batch; each step makes ``num_computed_tokens`` catch up with ``num_tokens``.
4. ``HELD`` (prefill role): prompt computed, KV promised to a decode worker; blocks stay until the hold ends.
5. ``FINISHED``: ended, once, with one reason. The block pool gets its blocks back when no launched step writes
   them and no read into them can land.

One table of transitions, one setter, one timestamp per state; all latencies derive from these.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


class RequestState(enum.Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    HELD = "held"
    FINISHED = "finished"


class FinishReason(enum.Enum):
    """Why a choice ended; mirrors inference.proto."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


class FailureCode(enum.Enum):
    """Why an attempt failed; mirrors worker.proto."""

    INVALID = "invalid"
    EXHAUSTED = "exhausted"
    KV_LOST = "kv_lost"
    DRAINING = "draining"
    DEADLINE = "deadline"
    INTERNAL = "internal"


TRANSITIONS: Mapping[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: frozenset({RequestState.LOADING, RequestState.RUNNING, RequestState.FINISHED}),
    RequestState.LOADING: frozenset({RequestState.RUNNING, RequestState.WAITING, RequestState.FINISHED}),
    RequestState.RUNNING: frozenset({RequestState.WAITING, RequestState.HELD, RequestState.FINISHED}),
    RequestState.HELD: frozenset({RequestState.FINISHED}),
    RequestState.FINISHED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. ``temperature == 0`` is greedy; ``seed`` is always resolved (the router draws one)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class StopParams:
    """What ends a choice inside the engine (stop strings live in the router). Limits count earlier attempts' output."""

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Constraint:
    """A structured-output constraint: ``kind`` is json_schema, regex, grammar or choice (JSON list of strings)."""

    kind: str
    source: str


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of ``token_id``, its rank (1 = most likely) and the best alternatives, best first."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class RequestStats:
    """What this worker did for an attempt; the wire form is ``AttemptStats``. Tokens and seconds."""

    cached_tokens: int = 0
    computed_tokens: int = 0
    remote_tokens: int = 0
    transfer_s: float = 0.0
    exposed_transfer_s: float = 0.0
    transfer_bytes: int = 0
    transport: str = ""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0
    read_s: float = 0.0
    sample_s: float = 0.0
    confirm_s: float = 0.0
    schedule_s: float = 0.0


@dataclass(slots=True, eq=False)
class Request:
    """One choice of one attempt, as the engine sees it.

    ``prompt_ids`` and ``output_ids`` stay apart: penalties, limits and the sampling index derive from the split.
    ``num_prior_outputs`` counts output tokens of earlier attempts; they are part of ``output_ids`` from the start
    and are never emitted again. ``transfer_id`` is 0 when this worker serves the attempt alone.
    """

    attempt_id: int
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    stop: StopParams
    choice: int = 0
    output_ids: list[int] = field(default_factory=list)
    num_prior_outputs: int = 0
    constraint: Constraint | None = None
    priority: int = 0
    cache_salt: str = ""
    transfer_id: int = 0
    deadline: float | None = None
    """Engine-clock time after which the attempt fails; None sets no limit."""
    arrival: float = 0.0
    origin: int = 0
    """Session that submitted it: outputs go back there, and its end aborts the request."""

    state: RequestState = RequestState.WAITING
    state_times: dict[RequestState, float] = field(default_factory=dict)
    num_computed_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    draft_ids: list[int] = field(default_factory=list)
    stats: RequestStats = field(default_factory=RequestStats)

    sequence: int = 0
    """Order of submission within the engine; choices of one attempt share it."""
    admitted_at: float | None = None
    """Engine-clock time when it first got blocks."""
    first_token_at: float | None = None
    """Engine-clock time of its first token here."""
    confirmed_at: float | None = None
    """Engine-clock time when its remote KV was confirmed; None again once a step has used it."""
    last_step: int = 0
    """Last launched step that writes its blocks."""
    block_hashes: list[bytes] = field(default_factory=list)
    """Hash chain of the full blocks of the known tokens, as far as computed."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """Log probabilities of the prompt gathered so far; said with the first token."""
    num_cached_blocks: int = 0
    """Leading blocks of ``block_ids`` already offered to the prefix cache."""

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt length."""
        return len(self.prompt_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt plus output tokens known so far; the last one may not have KV yet."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_new_outputs(self) -> int:
        """Output tokens that this attempt added."""
        return len(self.output_ids) - self.num_prior_outputs

    @property
    def is_decoding(self) -> bool:
        """Whether only the newest token lacks KV: a generated one, so that a step is one token (and drafts)."""
        outputs = len(self.output_ids)
        return outputs > self.num_prior_outputs and self.num_computed_tokens == len(self.prompt_ids) + outputs - 1

    def token(self, position: int) -> int:
        """Token at ``position`` of prompt + output."""
        n = len(self.prompt_ids)
        return self.prompt_ids[position] if position < n else self.output_ids[position - n]

    def tokens(self, start: int, end: int) -> list[int]:
        """Tokens ``[start, end)`` of prompt + output."""
        n = len(self.prompt_ids)
        return [*self.prompt_ids[start : min(end, n)], *self.output_ids[max(start - n, 0) : max(end - n, 0)]]

    def launched(self, step: int, now: float) -> None:
        """A step that writes its blocks starts."""
        self.last_step = step
        if self.confirmed_at is not None:
            self.stats.schedule_s = now - self.confirmed_at
            self.confirmed_at = None

    def set_state(self, state: RequestState, now: float) -> None:
        """The only way to change state.

        Raises:
            ValueError: the transition is not in ``TRANSITIONS``.
        """
        if state not in TRANSITIONS[self.state]:
            raise ValueError(f"attempt {self.attempt_id:x}: {self.state.value} -> {state.value} is not a transition")
        self.state = state
        self.state_times[state] = now
