"""``twinpool bench``: measurements that start what they measure and stop it again."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated, Any

import typer

from twinpool.cli.bench_load import load
from twinpool.cli.options import ConfigFile, Dtype, Json, Model, Settings, load_config
from twinpool.cli.output import print_json, print_nested


def register(app: typer.Typer) -> None:
    """Adds the command group."""
    group = typer.Typer(help="Measures servers under load, the hand-over, and the KV transfer.", no_args_is_help=True)
    group.command("load")(load)
    group.command("handover")(handover)
    group.command("transfer")(transfer)
    app.add_typer(group, name="bench")


def handover(
    config: ConfigFile = None,
    settings: Settings = None,
    model: Model = None,
    dtype: Dtype = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Prompt length.")] = 512,
    pairs: Annotated[int, typer.Option("--pairs", min=1, help="Disaggregated and monolithic requests.")] = 30,
    streams: Annotated[int, typer.Option("--streams", min=1, help="Other streams on decode, second part.")] = 8,
    long_tokens: Annotated[int, typer.Option("--long-tokens", min=1, help="Prompt length, third part.")] = 4096,
    long_requests: Annotated[int, typer.Option("--long-requests", min=1)] = 5,
    json: Json = False,
) -> None:
    """Compares requests through both pools with requests on the decode worker alone, behind one router."""
    from twinpool.bench.handover import Options
    from twinpool.launcher import prepare
    from twinpool.progress import Progress

    flags: dict[str, tuple[str, object]] = {
        "model.path": ("--model", model),
        "model.dtype": ("--dtype", dtype),
        "router.disaggregate": ("bench", "always"),
        "router.route_hints": ("bench", True),
        "router.grpc_port": ("bench", 0),
        "router.http_port": ("bench", 0),
        "prefill.replicas": ("bench", 1),
        "decode.replicas": ("bench", 1),
        # A step must be a token: gaps between tokens measure the pace of steps.
        "decode.engine.speculation": ("bench", "off"),
    }
    plan = prepare(load_config(config, settings, flags).config, Progress())
    result = asyncio.run(_handover(plan, Options(tokens, pairs, streams, long_tokens, long_requests)))
    _show(result, json)


def transfer(
    blocks: Annotated[str, typer.Option("--blocks", help="Sizes of reads, in blocks of 64 KiB.")] = "16,256,2048",
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Pairs of reads per size.")] = 20,
    json: Json = False,
) -> None:
    """Compares reads through the exchange with raw NIXL reads, over shared memory and TCP."""
    from twinpool.bench.transfer import compare

    _show(compare(blocks, rounds, _note), json)


async def _handover(plan: Any, options: Any) -> dict[str, Any]:
    from twinpool.bench.handover import measure
    from twinpool.launcher import deployment

    async with deployment(plan, lambda name, line: None, _note) as started:
        return await measure(started, options, _note)


def _note(text: str) -> None:
    print(f"twinpool: {text}", file=sys.stderr, flush=True)


def _show(result: dict[str, Any], json: bool) -> None:
    if json:
        print_json(result)
    else:
        print_nested(result)
