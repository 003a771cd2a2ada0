"""``twinpool status``: workers, links and load, as the router sees them."""

from __future__ import annotations

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


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("status")(status)


def status(
    address: Address = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    config: ConfigFile = None,
    settings: Settings = None,
    json: Json = False,
) -> None:
    """Prints workers, links and load; exits 1 while requests cannot be served."""
    loaded = load_config(config, settings, tls_flags(tls_ca, tls_cert, tls_key))
    with open_client(address, loaded, max_retries=0) as client:
        found = client.status()
        models = client.models()
    if json:
        from dataclasses import asdict

        print_json({**asdict(found), "models": [asdict(model) for model in models]})
        raise typer.Exit(0 if found.ready else 1)
    print(f"twinpool {found.version}: {'ready' if found.ready else f'not ready: {found.not_ready_reason}'}")
    print(f"  in flight  {found.in_flight}")
    for model in models:
        print(f"  model      {model.id} (up to {model.max_model_len} tokens, revision {model.revision[:12]})")
    for worker in found.workers:
        drains = ", draining" if worker.draining else ""
        print(f"{worker.worker_id or worker.address} ({worker.role or 'unknown role'}): {worker.state}{drains}")
        if worker.error:
            print(f"  error      {worker.error}")
        states = {"running": worker.running, "waiting": worker.waiting, "loading": worker.loading, "held": worker.held}
        print(f"  requests   {', '.join(f'{count} {state}' for state, count in states.items())}")
        quarantined = f", {worker.quarantined_blocks} quarantined" if worker.quarantined_blocks else ""
        print(f"  KV blocks  {worker.free_blocks} of {worker.total_blocks} free{quarantined}")
        print(f"  exchanges  {worker.open_exchanges} open")
        for link in worker.links:
            how = f"{link.transport} at {link.gigabytes_per_second:.2f} GB/s" if link.linked else f"none: {link.error}"
            print(f"  link       {link.prefill_worker}: {how}")
    raise typer.Exit(0 if found.ready else 1)
