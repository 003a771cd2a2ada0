"""What a request cost: usage and timings, put together from both workers' accounts and the router's clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twinpool.router.attempt import Attempt
from twinpool.router.messages import Stats


@dataclass(frozen=True, slots=True)
class Usage:
    """Where the prompt's KV came from; see ``Usage`` in inference.proto."""

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

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the worker which computed the prompt found in its cache."""
        computed_remotely = self.prefill_cached_tokens + self.prefill_computed_tokens > 0
        return self.prefill_cached_tokens if computed_remotely else self.decode_cached_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time went, in seconds; see ``Timings`` in inference.proto."""

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
class Summary:
    """The end of a request."""

    usage: Usage
    timings: Timings
    prefill_worker: str
    decode_worker: str


@dataclass(frozen=True, slots=True)
class Clockings:
    """Moments on the router's clock."""

    arrival: float
    dispatched: float
    first_token: float
    last_token: float
    end: float


def summarize(
    attempts: Sequence[Attempt], prompt_tokens: int, completion_tokens: int, redispatches: int, times: Clockings
) -> Summary:
    """Sums up; ``attempts`` in the order of dispatch.

    Where the prompt's KV came from and how long that took is told by the last attempt; drafts, preemptions and bytes
    add up over all of them.
    """
    last = attempts[-1]
    decode = last.stats_of("decode") or Stats()
    prefill = last.stats_of("prefill") or Stats()
    first = prefill if last.prefill is not None else decode
    every = [stats for attempt in attempts for stats in attempt.stats.values()]
    usage = Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        remote_tokens=decode.remote_tokens,
        decode_cached_tokens=decode.cached_tokens,
        decode_computed_tokens=decode.computed_tokens,
        prefill_cached_tokens=prefill.cached_tokens,
        prefill_computed_tokens=prefill.computed_tokens,
        transfer_bytes=sum(stats.transfer_bytes for a in attempts if (stats := a.stats_of("decode")) is not None),
        transport=decode.transport,
        route_reason=last.route.reason,
        redispatches=redispatches,
        draft_tokens=sum(stats.draft_tokens for stats in every),
        accepted_tokens=sum(stats.accepted_tokens for stats in every),
        preemptions=sum(stats.preemptions for stats in every),
    )
    timings = Timings(
        queue_s=times.dispatched - times.arrival + first.queue_s,
        prefill_s=first.prefill_s,
        transfer_s=decode.transfer_s,
        exposed_transfer_s=decode.exposed_transfer_s,
        decode_s=times.last_token - times.first_token,
        first_token_s=times.first_token - times.arrival,
        total_s=times.end - times.arrival,
        read_s=decode.read_s,
        sample_s=decode.sample_s,
        confirm_s=decode.confirm_s,
        schedule_s=decode.schedule_s,
        admission_s=times.dispatched - times.arrival,
    )
    prefill_worker = last.route.prefill[0] if last.route.prefill is not None else ""
    return Summary(usage, timings, prefill_worker, last.route.decode[0])
