"""``twinpool scale``: another size for a pool of a running deployment."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twinpool.cli.options import ConfigFile, Json, Settings, load_config
from twinpool.cli.output import print_json
from twinpool.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from twinpool.proto import controller_pb2
    from twinpool.rpc import Dialer

MAX, ALL = "max", "all"


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("scale")(scale)


def scale(
    pool: Annotated[str, typer.Argument(help="prefill or decode; `all 0` ends all workers.")],
    size: Annotated[str, typer.Argument(help="Number of workers, or max: as many as fit.")],
    address: Annotated[
        str | None,
        typer.Option(
            "--address", "-a", help="Controller's host:port; default from the configuration.", show_default=False
        ),
    ] = None,
    config: ConfigFile = None,
    settings: Settings = None,
    json: Json = False,
) -> None:
    """Adds workers to a pool, or drains the newest, and waits; exits 1 when a worker could not be started."""
    from twinpool.rpc import Dialer, dialled
    from twinpool.run_token import find_token
    from twinpool.tls import internal_client

    if size != MAX and not size.isdecimal():
        raise InvalidRequest(f"size {size!r} is no number; give the number of workers, or {MAX}", "size")
    if pool == ALL and size != "0":
        raise InvalidRequest(f"all {size} is no size; name a pool, or end all workers with `all 0`", "size")
    loaded = load_config(config, settings).config
    at = address or f"{dialled(loaded.controller.host)}:{loaded.controller.known_port}"
    port = at.rpartition(":")[2]
    if not port.isdecimal():
        raise ConfigError(f"--address {at} is no host:port; give the controller's, as `twinpool up` prints it")
    dialer = Dialer(loaded.session.token or find_token(int(port)), internal_client(loaded.tls))
    steps = asyncio.run(_scale(at, dialer, pool, size, json))
    if any(step["action"] == "failed" for step in steps):
        raise typer.Exit(1)


async def _scale(address: str, dialer: Dialer, pool: str, size: str, json: bool) -> list[dict[str, Any]]:
    import grpc.aio

    from twinpool.errors import Unavailable
    from twinpool.grpc_errors import error_from_rpc
    from twinpool.proto import controller_pb2, controller_pb2_grpc

    request = controller_pb2.ScaleRequest(pool=pool)
    if size == MAX:
        request.max = True
    else:
        request.replicas = int(size)
    started = time.monotonic()
    steps: list[dict[str, Any]] = []
    async with dialer.channel(address) as opened:
        stub = controller_pb2_grpc.ControllerServiceStub(opened)
        try:
            if pool == ALL:
                await stub.Clear(controller_pb2.ClearRequest())
                return []
            async for response in stub.Scale(request):
                steps.append(_step(response))
                if not json:
                    _print(pool, steps[-1])
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                raise Unavailable(
                    f"no controller answers at {address}; start one (twinpool up) or give its address (--address)"
                ) from error
            raise error_from_rpc(error) from error
    seconds = round(time.monotonic() - started, 3)
    if json:
        print_json({"pool": pool, "steps": steps, "seconds": seconds})
    elif not steps and pool != ALL:
        print(f"{pool} has that size already")
    return steps


def _step(response: controller_pb2.ScaleResponse) -> dict[str, Any]:
    from twinpool.proto import controller_pb2

    action = controller_pb2.ScaleResponse.Action.Name(response.action).removeprefix("ACTION_").lower()
    step: dict[str, Any] = {"action": action}
    if response.worker_id:
        step["worker"] = response.worker_id
    step |= {"seconds": round(response.seconds, 3), "replicas": response.replicas}
    return step | ({"error": response.error} if response.error else {})


def _print(pool: str, step: dict[str, Any]) -> None:
    if step["action"] == "failed":
        print(f"error: {step['error']}", file=sys.stderr, flush=True)
    else:
        print(f"{step['action']} {step['worker']} in {step['seconds']:.2f} s; {pool}: {step['replicas']}", flush=True)
