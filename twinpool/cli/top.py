"""``twinpool top``: a running deployment, live."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from twinpool.cli.options import (
    Address,
    ConfigFile,
    Settings,
    TlsCa,
    TlsCert,
    TlsKey,
    load_config,
    open_client,
    tls_flags,
)
from twinpool.errors import Unavailable

if TYPE_CHECKING:
    from rich.table import Table

    from twinpool.results import Status


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("top")(top)


def top(
    address: Address = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    config: ConfigFile = None,
    settings: Settings = None,
    interval: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Prints one look and ends.")] = False,
) -> None:
    """Shows the load of every worker, refreshed until Ctrl-C."""
    from rich.console import Console
    from rich.live import Live

    loaded = load_config(config, settings, tls_flags(tls_ca, tls_cert, tls_key))
    with open_client(address, loaded, max_retries=0) as client:
        status, seen = client.status(), time.monotonic()
        if once:
            Console().print(table(status, None, 0.0))
            return
        with Live(table(status, None, 0.0), auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                try:
                    before, status = status, client.status()
                except Unavailable as error:
                    live.update(error.message, refresh=True)
                    continue
                now = time.monotonic()
                live.update(table(status, before, now - seen), refresh=True)
                seen = now


def table(status: Status, before: Status | None, seconds: float) -> Table:
    """One look; with an earlier one, ``seconds`` ago, also steps per second."""
    from rich import box
    from rich.table import Table

    state = "ready" if status.ready else f"not ready: {status.not_ready_reason}"
    title = f"twinpool {status.version}, {state}, {status.in_flight} in flight"
    # Narrow, so that a worker is one line on a terminal of 80 columns; `twinpool status` tells of each link.
    found = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    found.add_column("worker", overflow="fold")
    for name in ("role", "state"):
        found.add_column(name, no_wrap=True)
    for name in ("run", "wait", "load", "held", "KV", "steps/s", "links", "GB/s"):
        found.add_column(name, justify="right", no_wrap=True)
    steps = {worker.worker_id: worker.steps for worker in before.workers} if before is not None else {}
    for worker in status.workers:
        used = 1 - worker.free_blocks / worker.total_blocks if worker.total_blocks else 0.0
        earlier = steps.get(worker.worker_id)
        pace = f"{(worker.steps - earlier) / seconds:.1f}" if earlier is not None and worker.steps >= earlier else ""
        paces = [link.gigabytes_per_second for link in worker.links if link.linked]
        found.add_row(
            worker.worker_id or worker.address,
            worker.role,
            "draining" if worker.draining and worker.state == "alive" else worker.state,
            *(str(count) for count in (worker.running, worker.waiting, worker.loading, worker.held)),
            f"{used:.0%}",
            pace,
            f"{len(paces)}/{len(worker.links)}" if worker.links else "",
            f"{min(paces):.1f}" if paces else "",
        )
    return found
