"""What the hand-over from prefill to decode costs: one router, one prefill and one decode worker, started for this.

1. Pairs of requests, one through both pools, one on the decode worker alone, take turns (also in who goes first):
   time to first token of both, the first gap, and the split of the hand-over.
2. The same disaggregated requests while the decode worker runs other streams.
3. Long prompts in several chunks: how much of the transfer is hidden behind the prefill.

The hand-over is the time from the last prefill kernel to the first decode step. Processes exchange durations, never
clock readings, so it is the sum of what the decode worker measured from the last segment that it heard of, and of that
one message's way, which is taken to be a quarter of what the first token spends on its ways (``hop``): client to router
to worker and back.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import statistics
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from twinpool.bench.figures import Figure, Machine
from twinpool.bench.probe import Probe, Sample
from twinpool.errors import TwinpoolError
from twinpool.launcher import Deployment
from twinpool.tls import client_tls

SEGMENTS_OF_LAST_CHUNK = 4
WARM_UP = 2
ANSWER = 4
STREAM_TOKENS = 64
"""Prompt length of the streams that decode runs beside."""
VOCABULARY = 256
"""Prompts are drawn from the first ids, which every model has."""


@dataclass(frozen=True, slots=True)
class Options:
    """``tokens``: prompt length of the pairs; ``streams``: what decode runs beside; ``long_*``: the third part."""

    tokens: int = 512
    pairs: int = 30
    streams: int = 8
    long_tokens: int = 4096
    long_requests: int = 5


async def measure(started: Deployment, options: Options, note: Callable[[str], None]) -> dict[str, Any]:
    """Measures a running deployment of one worker per pool; returns what the JSON output says."""
    machine = Machine.now()
    async with contextlib.AsyncExitStack() as stack:
        probe = Probe(started.grpc_address, started.config.client.api_key, client_tls(started.config), VOCABULARY)
        stack.push_async_callback(probe.close)
        note(f"{options.pairs} pairs at {options.tokens} tokens")
        remote, local = await _pairs(probe, options)
        note(f"{options.pairs} requests beside {options.streams} streams")
        beside, steps = await _beside(probe, options)
        note(f"{options.long_requests} requests of {options.long_tokens} tokens")
        long = [await _remote(probe, options.long_tokens) for _ in range(options.long_requests)]
    usage = remote[0].completion.usage
    return {
        "model": started.config.model.name,
        "machine": dataclasses.asdict(machine),
        "threads": {
            "prefill": started.config.prefill.engine.threads,
            "decode": started.config.decode.engine.threads,
        },
        "transport": usage.transport,
        "tokens": options.tokens,
        "bytes": usage.transfer_bytes,
        "ttft_ms": _ttft(remote, local),
        "idle": _handover(remote),
        "beside_streams": {
            "streams": options.streams,
            "decode_step_ms": _plain(Figure.of(steps)),
            **_handover(beside),
        },
        "long": {"tokens": options.long_tokens, "chunk": started.config.prefill.engine.prefill_chunk, **_overlap(long)},
    }


async def _pairs(probe: Probe, options: Options) -> tuple[list[Sample], list[Sample]]:
    remote: list[Sample] = []
    local: list[Sample] = []
    for number in range(WARM_UP + options.pairs):
        for route in ("remote", "local") if number % 2 else ("local", "remote"):
            if route == "remote":
                remote.append(await _remote(probe, options.tokens))
            else:
                local.append(await probe.send(probe.prompt(options.tokens), "local", ANSWER))
    return remote[WARM_UP:], local[WARM_UP:]


async def _remote(probe: Probe, tokens: int) -> Sample:
    sample = await probe.send(probe.prompt(tokens), "remote", ANSWER)
    usage = sample.completion.usage
    if usage.remote_tokens != tokens or usage.redispatches:
        raise TwinpoolError(f"a request did not go through both pools ({usage.route_reason}); see twinpool status")
    return sample


async def _beside(probe: Probe, options: Options) -> tuple[list[Sample], list[float]]:
    """Disaggregated requests while other streams decode, and the pace of those streams: seconds between tokens."""
    async with _streams(probe, options.streams) as gaps:
        samples = [await _remote(probe, options.tokens) for _ in range(options.pairs)]
        return samples, list(gaps)


@contextlib.asynccontextmanager
async def _streams(probe: Probe, count: int) -> AsyncIterator[list[float]]:
    """Keeps ``count`` requests generating on the decode worker; gathers their mean gaps.

    Fast steps reach the client several at a time, so that most gaps can be zero.
    """
    gaps: list[float] = []
    first = asyncio.Event()

    async def run() -> None:
        while True:
            sample = await probe.send(probe.prompt(STREAM_TOKENS), "local", STREAM_TOKENS)
            gaps.append(statistics.fmean(sample.gaps_s))
            if len(gaps) >= count:
                first.set()

    tasks = [asyncio.create_task(run()) for _ in range(count)]
    try:
        if tasks:
            waiting = asyncio.create_task(first.wait())
            done, _ = await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            for task in done - {waiting}:
                task.result()
        yield gaps
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _ttft(remote: Sequence[Sample], local: Sequence[Sample]) -> dict[str, Any]:
    differences = [r.ttft_s - m.ttft_s for r, m in zip(remote, local, strict=True)]
    return {
        "disaggregated": _plain(Figure.of(sample.ttft_s for sample in remote)),
        "monolithic": _plain(Figure.of(sample.ttft_s for sample in local)),
        "difference": _plain(Figure.of(differences)),
        "disaggregated_parts": _ttft_parts(remote),
        "monolithic_parts": _ttft_parts(local),
    }


def _ttft_parts(samples: Sequence[Sample]) -> dict[str, float]:
    """Medians: arrival to first step (``queue``, dispatch included), prompt and first token, all ways together."""
    timings = [sample.completion.timings for sample in samples]
    return {
        "queue": Figure.of(t.queue_s for t in timings).median,
        "prefill": Figure.of(t.prefill_s for t in timings).median,
        "ways": Figure.of(_ways(samples)).median,
    }


def _ways(samples: Sequence[Sample]) -> list[float]:
    timings = [sample.completion.timings for sample in samples]
    return [s.ttft_s - t.queue_s - t.prefill_s for s, t in zip(samples, timings, strict=True)]


def _handover(samples: Sequence[Sample]) -> dict[str, Any]:
    timings = [sample.completion.timings for sample in samples]
    reads = [t.exposed_transfer_s - t.confirm_s for t in timings]
    hops = [ways / 4 for ways in _ways(samples)]
    totals = [h + t.sample_s + t.exposed_transfer_s + t.schedule_s for h, t in zip(hops, timings, strict=True)]
    return {
        "ttft_ms": _plain(Figure.of(sample.ttft_s for sample in samples)),
        "handover_ms": _plain(Figure.of(totals)),
        "parts_ms": {
            "hop": Figure.of(hops).median,
            "sample": Figure.of(t.sample_s for t in timings).median,
            "read": Figure.of(reads).median,
            "confirm": Figure.of(t.confirm_s for t in timings).median,
            "schedule": Figure.of(t.schedule_s for t in timings).median,
        },
        "segment_read_ms": Figure.of(t.read_s / SEGMENTS_OF_LAST_CHUNK for t in timings).median,
        "first_gap_ms": _plain(Figure.of(sample.gaps_s[0] for sample in samples)),
        "later_gap_ms": _plain(Figure.of(gap for sample in samples for gap in sample.gaps_s[1:])),
    }


def _overlap(samples: Sequence[Sample]) -> dict[str, Any]:
    """``exposed``: from the end of the prefill to the confirmed copy; ``transfer``: from the first readable KV."""
    timings = [sample.completion.timings for sample in samples]
    usage = [sample.completion.usage for sample in samples]
    rates = [u.transfer_bytes / t.read_s / 1e9 for u, t in zip(usage, timings, strict=True) if t.read_s]
    return {
        "bytes": usage[0].transfer_bytes,
        "prefill_ms": _plain(Figure.of(t.prefill_s for t in timings)),
        "transfer_ms": _plain(Figure.of(t.transfer_s for t in timings)),
        "reading_ms": _plain(Figure.of(t.read_s for t in timings)),
        "exposed_ms": _plain(Figure.of(t.exposed_transfer_s for t in timings)),
        "confirm_ms": _plain(Figure.of(t.confirm_s for t in timings)),
        "exposed_share_of_transfer": _share(t.exposed_transfer_s / t.transfer_s for t in timings if t.transfer_s),
        "exposed_read_share_of_reading": _share(
            (t.exposed_transfer_s - t.confirm_s) / t.read_s for t in timings if t.read_s
        ),
        "gigabytes_per_second": round(statistics.median(rates), 2) if rates else 0.0,
    }


def _share(values: Any) -> float:
    series = list(values)
    return round(statistics.median(series), 4) if series else 0.0


def _plain(figure: Figure) -> dict[str, Any]:
    return dataclasses.asdict(figure)
