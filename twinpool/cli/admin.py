"""``twinpool drain``, ``flush-cache`` and ``log-level``: what operators ask of a deployment, through a router."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from twinpool.cli.options import ConfigFile, Json, Settings, load_config
from twinpool.cli.output import print_json
from twinpool.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from twinpool.proto.admin_pb2_grpc import AdminServiceStub

AdminAddress: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--address", "-a", help="host:port of the router's admin service, on its machine.", show_default=False
    ),
]


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command("drain")(drain)
    app.command("flush-cache")(flush_cache)
    app.command("log-level")(log_level)


def drain(
    worker: Annotated[str, typer.Argument(help="The worker, as `twinpool status` names it.")],
    undo: Annotated[bool, typer.Option("--undo", help="Takes the worker back into service.")] = False,
    hand_over: Annotated[
        float | None,
        typer.Option(
            "--hand-over", min=0, help="Seconds until what still runs is handed to other workers.", show_default="never"
        ),
    ] = None,
    wait: Annotated[bool, typer.Option(help="Waits until the worker has nothing left to do.")] = True,
    address: AdminAddress = None,
    config: ConfigFile = None,
    settings: Settings = None,
    json: Json = False,
) -> None:
    """Makes a worker refuse new requests and finish what it has; its process stays."""
    from twinpool.proto import admin_pb2

    request = admin_pb2.DrainRequest(worker_id=worker, undo=undo, hand_over_s=hand_over, wait=wait)
    answer = _call(address, config, settings, lambda stub: stub.Drain(request))
    if json:
        print_json({"worker": worker, "draining": not undo, "requests": answer.requests})
    else:
        left = f"{answer.requests} requests left" if answer.requests else "nothing left to do"
        print(f"{worker} {'takes requests again' if undo else f'is draining: {left}'}")


def flush_cache(
    address: AdminAddress = None, config: ConfigFile = None, settings: Settings = None, json: Json = False
) -> None:
    """Makes all workers forget the cached prefixes that no request uses."""
    from twinpool.proto import admin_pb2

    answer = _call(address, config, settings, lambda stub: stub.FlushCache(admin_pb2.FlushCacheRequest()))
    _print_names("flushed", list(answer.worker_ids), json)


def log_level(
    level: Annotated[str, typer.Argument(help="debug, info, warning or error.")],
    target: Annotated[
        str, typer.Argument(help="A worker, or router; default: all workers and the router.", show_default=False)
    ] = "",
    address: AdminAddress = None,
    config: ConfigFile = None,
    settings: Settings = None,
    json: Json = False,
) -> None:
    """Changes how much running processes log, until they restart."""
    from twinpool.proto import admin_pb2

    request = admin_pb2.SetLogLevelRequest(level=level, target=target)
    answer = _call(address, config, settings, lambda stub: stub.SetLogLevel(request))
    _print_names(f"log at {level}", list(answer.names), json)


def _print_names(what: str, names: list[str], json: bool) -> None:
    if json:
        print_json({"names": names})
    else:
        print(f"{what}: {', '.join(names) or 'nobody is connected'}")


def _call(
    address: str | None,
    config: Path | None,
    settings: list[str] | None,
    method: Callable[[AdminServiceStub], Awaitable[Any]],
) -> Any:
    from twinpool.rpc import Dialer
    from twinpool.run_token import find_token
    from twinpool.tls import internal_client

    loaded = load_config(config, settings).config
    at = address or f"127.0.0.1:{loaded.router.known_admin_port}"
    port = at.rpartition(":")[2]
    if not port.isdecimal():
        raise ConfigError(f"--address {at} is no host:port; write for example 127.0.0.1:8101")
    dialer = Dialer(loaded.session.token or find_token(int(port)), internal_client(loaded.tls))
    return asyncio.run(_ask(at, dialer, method))


async def _ask(address: str, dialer: Any, method: Callable[[AdminServiceStub], Awaitable[Any]]) -> Any:
    import grpc.aio

    from twinpool.errors import Unavailable
    from twinpool.grpc_errors import error_from_rpc
    from twinpool.proto.admin_pb2_grpc import AdminServiceStub

    async with dialer.channel(address) as opened:
        try:
            return await method(AdminServiceStub(opened))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE and "failed to connect" in (error.details() or ""):
                raise Unavailable(
                    f"no router's admin service answers at {address}; set router.admin_port where the router runs, "
                    "and ask on its machine"
                ) from error
            raise error_from_rpc(error) from error
