"""``twinpool bench load``: load on a running server, ours or any that speaks OpenAI's API."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twinpool.cli.options import Address, ConfigFile, Json, Settings, client_address, load_config
from twinpool.cli.output import print_json, print_nested
from twinpool.errors import ConfigError

if TYPE_CHECKING:
    from twinpool.bench.target import Target, Timeline
    from twinpool.bench.workload import Row


def load(
    address: Address = None,
    config: ConfigFile = None,
    settings: Settings = None,
    url: Annotated[str | None, typer.Option("--url", help="OpenAI-compatible server, instead of gRPC.")] = None,
    prefill_url: Annotated[str | None, typer.Option("--prefill-url", help="Prefill server of a vLLM pair.")] = None,
    model: Annotated[str, typer.Option("--model", "-m", help="Name in requests to --url.")] = "",
    requests: Annotated[int, typer.Option("--requests", "-n", min=1)] = 64,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", "-j", min=1, help="Closed loop; with a rate: the most at once.")
    ] = None,
    rate: Annotated[float | None, typer.Option("--rate", help="Open loop: requests per second.")] = None,
    burstiness: Annotated[float, typer.Option("--burstiness", help="Shape of the gamma gaps; 1 is Poisson.")] = 1.0,
    trace: Annotated[Path | None, typer.Option("--trace", help="CSV or JSONL of times and lengths.")] = None,
    speed: Annotated[float, typer.Option("--speed", help="Replays the trace this many times as fast.")] = 1.0,
    most_tokens: Annotated[
        int | None, typer.Option("--max-tokens", help="Leaves out longer requests of the trace.")
    ] = None,
    input_tokens: Annotated[int, typer.Option("--input-tokens", "-i", min=1)] = 512,
    output_tokens: Annotated[int, typer.Option("--output-tokens", "-o", min=1)] = 64,
    spread: Annotated[float, typer.Option("--spread", min=0, max=1, help="Lengths vary by ± this share.")] = 0.0,
    text: Annotated[bool, typer.Option("--text", help="Prompts are text, not token ids.")] = False,
    vocabulary: Annotated[int, typer.Option("--vocabulary", min=1, help="Token ids are drawn below this.")] = 32_000,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    warm_up: Annotated[int, typer.Option("--warm-up", min=0, help="Requests before, not counted.")] = 2,
    slo_ttft: Annotated[float | None, typer.Option("--slo-ttft", help="Goodput: most TTFT, ms.")] = None,
    slo_tpot: Annotated[float | None, typer.Option("--slo-tpot", help="Goodput: most TPOT, ms.")] = None,
    slo_e2e: Annotated[float | None, typer.Option("--slo-e2e", help="Goodput: most time in all, ms.")] = None,
    png: Annotated[Path | None, typer.Option("--png", help="Writes a picture of the distributions.")] = None,
    json: Json = False,
) -> None:
    """Measures TTFT, TPOT, gaps, throughput and goodput of a running server, greedy, with answers of exact length."""
    from twinpool.bench import load_report, workload

    if trace is not None and rate is not None:
        raise ConfigError("--trace brings its own times; leave out --rate, or use --speed")
    if trace is not None:
        rows = workload.read_trace(trace, requests, most_tokens, speed)
    else:
        rows = workload.made_up(requests, input_tokens, output_tokens, spread, seed)
    offsets = _offsets(rows, rate, burstiness, seed)
    maker = workload.PromptMaker(vocabulary, text, seed)
    asks = [maker.ask(row) for row in rows]
    first = [maker.ask(row) for row in rows[:warm_up]]

    async def run() -> list[Timeline]:
        from twinpool.bench.target import run_closed, run_open

        target = _target(url, prefill_url, model, address, config, settings)
        try:
            for ask in first:
                if error := (await target.ask(ask)).error:
                    raise ConfigError(f"the first request failed ({error}); check the address and --model")
            if offsets is None:
                return await run_closed(target, asks, concurrency or 1)
            return await run_open(target, asks, offsets, concurrency)
        finally:
            await target.close()

    timelines = asyncio.run(run())
    result = {
        "target": url or "grpc",
        "loop": "closed" if offsets is None else "open",
        "concurrency": concurrency if offsets is not None else concurrency or 1,
        "rate": rate,
        **load_report.report(timelines, load_report.Objectives(slo_ttft, slo_tpot, slo_e2e)),
    }
    if png is not None:
        _plot(timelines, result, png)
    (print_json if json else print_nested)(result)


def _offsets(rows: list[Row], rate: float | None, burstiness: float, seed: int) -> list[float] | None:
    if rate is not None:
        from twinpool.bench.arrivals import gamma

        try:
            return gamma(len(rows), rate, burstiness, seed)
        except ValueError as error:
            raise ConfigError(str(error)) from error
    return [row.at or 0.0 for row in rows] if rows and rows[0].at is not None else None


def _target(
    url: str | None,
    prefill_url: str | None,
    model: str,
    address: str | None,
    config: Path | None,
    settings: list[str] | None,
) -> Target:
    loaded = load_config(config, settings)
    key = loaded.config.client.api_key
    if url is not None:
        try:
            from twinpool.bench.openai_target import OpenAITarget
        except ImportError as error:
            raise ConfigError(f"--url needs {error.name}; pip install {error.name}") from error
        return OpenAITarget(url, model, key, prefill_url)
    from twinpool import AsyncClient
    from twinpool.bench.target import GrpcTarget
    from twinpool.tls import client_tls

    tls = client_tls(loaded.config) or False
    return GrpcTarget(AsyncClient(client_address(address, loaded), token=key, tls=tls, max_retries=0))


def _plot(timelines: list[Timeline], result: dict[str, Any], path: Path) -> None:
    try:
        from twinpool.bench.load_plot import plot
    except ImportError as error:
        raise ConfigError(f"--png needs {error.name}; pip install {error.name}") from error
    if not any(timeline.pieces for timeline in timelines):
        print("twinpool: no answers, no picture", file=sys.stderr)
        return
    title = (
        f"{result['requests']} requests, {result['output_tokens_per_second']} output tokens/s, {result['loop']} loop"
    )
    try:
        plot(timelines, title, path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
