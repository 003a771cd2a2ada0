"""What the Python client returns: plain frozen dataclasses, independent of the wire format.

A stream yields ``Chunk``s; ``Collector`` gathers the same messages into the ``Completion`` that both the streaming
and the one-shot calls end in.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal

from twinpool.proto import inference_pb2 as pb

FinishReason = Literal["stop", "length", "cancelled"]

_FINISH: dict[int, FinishReason] = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_CANCELLED: "cancelled",
}


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural logarithm of a token's probability before sampling filters; ``top`` holds (token id, logprob) pairs."""

    token_id: int
    logprob: float
    rank: int
    text: str
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of one choice; ``finish_reason`` is set in the choice's last piece."""

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens by where the prompt's KV came from, and how it travelled; the fields are those of the wire's Usage."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    remote_tokens: int = 0
    decode_cached_tokens: int = 0
    decode_computed_tokens: int = 0
    prefill_cached_tokens: int = 0
    prefill_computed_tokens: int = 0
    transfer_bytes: int = 0
    transport: str = ""
    route_reason: str = ""
    redispatches: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds, as the router and the workers measured them; the fields are those of the wire's Timings."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    exposed_transfer_s: float = 0.0
    decode_s: float = 0.0
    first_token_s: float = 0.0
    total_s: float = 0.0
    read_s: float = 0.0
    sample_s: float = 0.0
    confirm_s: float = 0.0
    schedule_s: float = 0.0
    admission_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Choice:
    """One complete answer."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprob, ...]
    finish_reason: FinishReason | None
    stop_reason: str


@dataclass(frozen=True, slots=True)
class Completion:
    """A complete response; ``text``, ``token_ids`` and ``finish_reason`` are those of the first choice."""

    request_id: str
    choices: tuple[Choice, ...]
    usage: Usage
    timings: Timings
    prefill_worker: str
    decode_worker: str
    prompt_token_ids: tuple[int, ...] = ()
    prompt_logprobs: tuple[Logprob, ...] = ()

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of the first choice."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the first choice ended."""
        return self.choices[0].finish_reason


@dataclass(frozen=True, slots=True)
class Model:
    """A served model; ``max_model_len`` bounds prompt plus answer, in tokens."""

    id: str
    max_model_len: int
    revision: str


@dataclass(frozen=True, slots=True)
class Link:
    """A decode worker's link to a prefill worker."""

    prefill_worker: str
    linked: bool
    transport: str
    gigabytes_per_second: float
    error: str


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker as the router sees it; counts are requests, ``*_blocks`` KV blocks."""

    worker_id: str
    role: str
    state: str
    address: str
    model: str
    running: int
    waiting: int
    loading: int
    held: int
    free_blocks: int
    total_blocks: int
    open_exchanges: int
    quarantined_blocks: int
    draining: bool
    links: tuple[Link, ...]
    error: str
    steps: int


@dataclass(frozen=True, slots=True)
class Status:
    """The deployment's state."""

    version: str
    workers: tuple[WorkerStatus, ...]
    in_flight: int
    ready: bool
    not_ready_reason: str


@dataclass(slots=True)
class _Parts:
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str = ""


class Collector:
    """Gathers the messages of one response, in order."""

    def __init__(self) -> None:
        self.request_id = ""
        self._choices: dict[int, _Parts] = {}
        self._last = pb.GenerateResponse()
        self._prompt_ids: list[int] = []
        self._prompt_logprobs: list[Logprob] = []

    def add(self, message: pb.GenerateResponse) -> Chunk:
        """Takes the next message; returns it as a chunk."""
        chunk = Chunk(
            index=message.index,
            text=message.text,
            token_ids=tuple(message.token_ids),
            logprobs=tuple(_logprob(item) for item in message.logprobs),
            finish_reason=_FINISH.get(message.finish_reason),
            stop_reason=message.stop_reason,
        )
        parts = self._choices.setdefault(chunk.index, _Parts())
        parts.text.append(chunk.text)
        parts.token_ids.extend(chunk.token_ids)
        parts.logprobs.extend(chunk.logprobs)
        parts.finish_reason = chunk.finish_reason or parts.finish_reason
        parts.stop_reason = chunk.stop_reason or parts.stop_reason
        self._prompt_ids.extend(message.prompt_token_ids)
        if chunk.index == 0:
            self._prompt_logprobs.extend(_logprob(item) for item in message.prompt_logprobs)
        self._last = message
        return chunk

    def completion(self) -> Completion:
        """What was gathered; whole once the last message was added."""
        choices = [
            Choice(
                index,
                "".join(parts.text),
                tuple(parts.token_ids),
                tuple(parts.logprobs),
                parts.finish_reason,
                parts.stop_reason,
            )
            for index, parts in sorted(self._choices.items())
        ]
        return Completion(
            request_id=self.request_id,
            choices=tuple(choices),
            usage=_usage(self._last.usage),
            timings=_timings(self._last.timings),
            prefill_worker=self._last.prefill_worker,
            decode_worker=self._last.decode_worker,
            prompt_token_ids=tuple(self._prompt_ids),
            prompt_logprobs=tuple(self._prompt_logprobs),
        )


def models_from_proto(response: pb.ListModelsResponse) -> tuple[Model, ...]:
    """The served models, the default first."""
    return tuple(Model(model.id, model.max_model_len, model.revision) for model in response.models)


def status_from_proto(response: pb.GetStatusResponse) -> Status:
    """The deployment's state."""
    return Status(
        version=response.version,
        workers=tuple(_worker(worker) for worker in response.workers),
        in_flight=response.in_flight,
        ready=response.ready,
        not_ready_reason=response.not_ready_reason,
    )


def _worker(worker: pb.WorkerStatus) -> WorkerStatus:
    links = tuple(
        Link(link.prefill_worker, link.linked, link.transport, link.gigabytes_per_second, link.error)
        for link in worker.links
    )
    return WorkerStatus(
        worker_id=worker.worker_id,
        role=worker.role,
        state=worker.state,
        address=worker.address,
        model=worker.model,
        running=worker.running,
        waiting=worker.waiting,
        loading=worker.loading,
        held=worker.held,
        free_blocks=worker.free_blocks,
        total_blocks=worker.total_blocks,
        open_exchanges=worker.open_exchanges,
        quarantined_blocks=worker.quarantined_blocks,
        draining=worker.draining,
        links=links,
        error=worker.error,
        steps=worker.steps,
    )


def _usage(usage: pb.Usage) -> Usage:
    values = {descriptor.name: value for descriptor, value in usage.ListFields()}
    return Usage(**{item.name: values[item.name] for item in fields(Usage) if item.name in values})


def _timings(timings: pb.Timings) -> Timings:
    values = {descriptor.name: value for descriptor, value in timings.ListFields()}
    return Timings(**{item.name: values[item.name] for item in fields(Timings) if item.name in values})


def _logprob(item: pb.TokenLogprob) -> Logprob:
    top = tuple((other.token_id, other.logprob) for other in item.top)
    return Logprob(item.token_id, item.logprob, item.rank, item.text, top)
