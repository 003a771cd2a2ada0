"""What passes between the router and a worker, as plain values; ``wire`` translates them to and from worker.v1.

All durations are seconds, all sizes tokens or blocks. Nothing here is ever changed after it was made.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Role = Literal["prefill", "decode"]


class FinishReason(enum.Enum):
    """Why a choice ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


class FailureCode(enum.Enum):
    """Why an attempt failed on a worker."""

    INVALID = "invalid"
    EXHAUSTED = "exhausted"
    KV_LOST = "kv_lost"
    DRAINING = "draining"
    DEADLINE = "deadline"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """How a worker describes itself in ``Welcome``; fixed for the life of its process."""

    worker_id: str
    epoch: int
    protocol: int
    role: str
    model: str
    revision: str
    layout: str
    layout_text: str
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    kv_address: str
    connector: str
    vocab_size: int


@dataclass(frozen=True, slots=True)
class LinkReport:
    """State of a decode worker's link to one prefill worker."""

    worker_id: str
    epoch: int
    linked: bool
    transport: str = ""
    gigabytes_per_second: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Totals:
    """Counters of a worker since its start; see ``Totals`` in worker.proto."""

    transfers: int = 0
    transfers_lost: int = 0
    transfer_bytes: int = 0
    transfer_s: float = 0.0
    exposed_transfer_s: float = 0.0
    holds_released: int = 0
    holds_revoked: int = 0
    preemptions: int = 0
    batches: int = 0
    batch_requests: int = 0
    batch_tokens: int = 0
    batch_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """Load of a worker at one moment."""

    steps: int = 0
    running: int = 0
    waiting: int = 0
    loading: int = 0
    held: int = 0
    free_blocks: int = 0
    queued_tokens: int = 0
    open_exchanges: int = 0
    quarantined_blocks: int = 0
    draining: bool = False
    links: tuple[LinkReport, ...] = ()
    totals: Totals = Totals()


@dataclass(frozen=True, slots=True)
class Peer:
    """A prefill worker to link to."""

    worker_id: str
    epoch: int
    kv_address: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """Resolved sampling; ``seed`` is always set, ``temperature == 0`` is greedy."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Stopping:
    """Resolved stopping; ``max_tokens`` counts the output of all attempts."""

    max_tokens: int
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False


@dataclass(frozen=True, slots=True)
class Constraint:
    """A structured-output constraint; ``source`` is text, or the tuple of alternatives when ``kind`` is choice."""

    kind: Literal["json_schema", "regex", "grammar", "choice"]
    source: str | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Submission:
    """An attempt as one worker gets it; see ``Submit`` in worker.proto."""

    attempt_id: int
    request_id: str
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    sampling: Sampling
    n: int
    first_choice: int
    stopping: Stopping
    constraint: Constraint | None
    logprobs: int | None
    prompt_logprobs: int | None
    priority: int
    cache_salt: str
    deadline_s: float
    transfer_id: int = 0
    prefill_worker: str = ""
    prefill_epoch: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of a token, its rank (1 = most likely) and the best alternatives, best first."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Stats:
    """What one worker did for one attempt."""

    cached_tokens: int = 0
    computed_tokens: int = 0
    remote_tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
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


@dataclass(frozen=True, slots=True)
class Output:
    """New tokens of one choice of one attempt; ``index`` is the output index of the first one."""

    attempt_id: int
    choice: int
    index: int
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprob] = ()
    finish: FinishReason | None = None
    stop_token_id: int | None = None
    prompt_logprobs: Sequence[TokenLogprob] = ()
    stats: Stats | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """An attempt ended on a worker without finishing."""

    attempt_id: int
    code: FailureCode
    message: str
    field: str = ""
