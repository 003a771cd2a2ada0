"""``twinpool trace``: where the time of one request went."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from twinpool.cli.options import (
    Address,
    ConfigFile,
    Json,
    Settings,
    TlsCa,
    TlsCert,
    TlsKey,
    load_config,
    open_client,
    tls_flags,
)
from twinpool.cli.output import print_json

if TYPE_CHECKING:
    from twinpool.trace import Trace

WIDTH = 40


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("trace")(trace)


def trace(
    request_id: Annotated[str, typer.Argument(help="Id of a request that has ended, as its answer gave it.")],
    address: Address = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    config: ConfigFile = None,
    settings: Settings = None,
    json: Json = False,
) -> None:
    """Shows the stages of a recent request, what each usually takes, and which one to look at."""
    loaded = load_config(config, settings, tls_flags(tls_ca, tls_cert, tls_key))
    with open_client(address, loaded, max_retries=0) as client:
        found = client.trace(request_id)
    if json:
        print_json(asdict(found))
        return
    print(f"{found.request_id}: {found.outcome}, {found.total_s * 1e3:.0f} ms in all", end="")
    print(f", first token after {found.first_token_s * 1e3:.0f} ms" if found.first_token_s else "")
    if found.route_reason:
        print(f"path: {found.route_reason}" + (f"; {found.redispatches} redispatches" if found.redispatches else ""))
    _print_stages(found)


def _print_stages(trace: Trace) -> None:
    scale = WIDTH / max(trace.total_s, 1e-9)
    for stage in trace.stages:
        start = min(WIDTH - 1, round(stage.start_s * scale))
        length = min(WIDTH - start, max(1, round(stage.duration_s * scale)))
        bar = (" " * start + "█" * length).ljust(WIDTH)
        usual = "" if stage.usual_s is None else f", usually {stage.usual_s * 1e3:.1f}"
        mark = " ◀" if stage.name == trace.suspect else ""
        print(f"{stage.name:<14}{stage.worker:<18}│{bar}│ {stage.delay_s * 1e3:9.1f} ms{usual}{mark}")
    if trace.suspect:
        print(f"look at: {trace.suspect}")
