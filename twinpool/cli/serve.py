"""``twinpool serve``: one process of a deployment, for ``up``, for containers and for separate machines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from twinpool.cli.options import ConfigFile, Dtype, Model, Settings, load_config
from twinpool.config import Config
from twinpool.errors import ConfigError

Host = Annotated[str | None, typer.Option("--host", help="Address to listen on.", show_default="127.0.0.1")]
Launcher = Annotated[
    str | None, typer.Option("--launcher", help="local or ray: how ranks start.", show_default="local")
]
Port = Annotated[int | None, typer.Option("--port", help="gRPC port; 0 picks a free one.", show_default="0")]


def register(app: typer.Typer) -> None:
    """Adds the command group."""
    group = typer.Typer(
        help="Runs one process: router, worker, controller, or a node for ranks of a worker.",
        no_args_is_help=True,
    )
    group.command("router")(router)
    group.command("prefill")(prefill)
    group.command("decode")(decode)
    group.command("controller")(controller)
    group.command("follower")(follower)
    app.add_typer(group, name="serve")


def router(
    config: ConfigFile = None,
    settings: Settings = None,
    model: Model = None,
    host: Host = None,
    grpc_port: Annotated[int | None, typer.Option("--grpc-port", help="Public gRPC port.", show_default="8100")] = None,
    http_port: Annotated[int | None, typer.Option("--http-port", help="HTTP port.", show_default="8000")] = None,
    workers: Annotated[
        str | None, typer.Option("--workers", help="host:port of all workers, comma-separated.", show_default=False)
    ] = None,
    disaggregate: Annotated[
        str | None, typer.Option("--disaggregate", help="always, auto or never.", show_default="auto")
    ] = None,
) -> None:
    """Runs the router: the public gRPC and HTTP surfaces."""
    flags = {
        "model.path": ("--model", model),
        "router.host": ("--host", host),
        "router.grpc_port": ("--grpc-port", grpc_port),
        "router.http_port": ("--http-port", http_port),
        "router.workers": ("--workers", workers),
        "router.disaggregate": ("--disaggregate", disaggregate),
    }
    prepared, folder = _prepare(config, settings, flags, with_weights=False)
    from twinpool.router.main import run

    raise typer.Exit(run(prepared, folder))


def prefill(
    config: ConfigFile = None,
    settings: Settings = None,
    model: Model = None,
    dtype: Dtype = None,
    host: Host = None,
    port: Port = None,
    launcher: Launcher = None,
    kv_port: Annotated[int | None, typer.Option("--kv-port", help="Port of the KV service.", show_default="0")] = None,
) -> None:
    """Runs a prefill worker: computes prompts and promises their KV."""
    flags = _worker_flags("prefill", model, dtype, host, port, launcher)
    flags |= {"prefill.kv_port": ("--kv-port", kv_port)}
    prepared, folder = _prepare(config, settings, flags)
    _require("torch", "twinpool[worker,nixl]")
    from twinpool.prefill_worker.main import run

    raise typer.Exit(run(prepared, folder))


def decode(
    config: ConfigFile = None,
    settings: Settings = None,
    model: Model = None,
    dtype: Dtype = None,
    host: Host = None,
    port: Port = None,
    launcher: Launcher = None,
) -> None:
    """Runs a decode worker: reads KV and generates."""
    prepared, folder = _prepare(config, settings, _worker_flags("decode", model, dtype, host, port, launcher))
    _require("torch", "twinpool[worker,nixl]")
    from twinpool.decode_worker.main import run

    raise typer.Exit(run(prepared, folder))


def controller(
    config: ConfigFile = None,
    settings: Settings = None,
    host: Host = None,
    port: Annotated[int | None, typer.Option("--port", help="gRPC port; 0 picks one.", show_default="8200")] = None,
    ray_address: Annotated[
        str | None, typer.Option("--ray-address", help="host:port of the Ray cluster.", show_default=False)
    ] = None,
) -> None:
    """Keeps both pools at their sizes on a Ray cluster; needs a node of it on this machine."""
    from twinpool.logs import setup_logging
    from twinpool.parent_watch import follow_parent

    follow_parent()
    flags: dict[str, tuple[str, object]] = {
        "controller.host": ("--host", host),
        "controller.port": ("--port", port),
        "ray.address": ("--ray-address", ray_address),
    }
    loaded = load_config(config, settings, flags).config
    setup_logging(loaded.logging)
    _require("ray", "twinpool[worker,ray]")
    from twinpool.controller.main import run

    raise typer.Exit(run(loaded))


def follower(
    config: ConfigFile = None,
    settings: Settings = None,
    head: Annotated[
        str | None, typer.Option("--head", help="host:port of the worker's Ray head.", show_default=False)
    ] = None,
    host: Host = None,
    port: Annotated[int | None, typer.Option("--port", help="Health port.", show_default="0")] = None,
) -> None:
    """Lends this node to the ranks of a worker whose first rank runs elsewhere, with --launcher ray."""
    from twinpool.logs import setup_logging
    from twinpool.parent_watch import follow_parent

    follow_parent()
    flags = {"ray.address": ("--head", head), "follower.host": ("--host", host), "follower.port": ("--port", port)}
    loaded = load_config(config, settings, flags).config
    setup_logging(loaded.logging)
    _require("ray", "twinpool[worker,ray]")
    from twinpool.worker.follower import run

    raise typer.Exit(run(loaded))


def _worker_flags(
    role: str, model: str | None, dtype: str | None, host: str | None, port: int | None, launcher: str | None
) -> dict[str, tuple[str, object]]:
    return {
        "model.path": ("--model", model),
        "model.dtype": ("--dtype", dtype),
        f"{role}.host": ("--host", host),
        f"{role}.port": ("--port", port),
        f"{role}.launcher": ("--launcher", launcher),
    }


def _prepare(
    file: Path | None,
    settings: list[str] | None,
    flags: Mapping[str, tuple[str, object]],
    with_weights: bool = True,
) -> tuple[Config, Path]:
    """Loads the configuration, sets up the process and finds the model; the name in requests is filled in."""
    from twinpool.logs import setup_logging
    from twinpool.model_source import model_name, resolve_model
    from twinpool.parent_watch import follow_parent
    from twinpool.progress import Progress

    follow_parent()
    loaded = load_config(file, settings, flags).config
    setup_logging(loaded.logging)
    folder = resolve_model(loaded.model, Progress(), with_weights)
    model = loaded.model.model_copy(update={"name": model_name(loaded.model)})
    return loaded.model_copy(update={"model": model}), folder


def _require(package: str, extra: str) -> None:
    import importlib.util

    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"this command needs {package}, which is not installed; pip install '{extra}'")
