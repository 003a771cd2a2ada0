"""Starts a whole deployment on this machine: one router, a prefill pool and a decode pool, as separate processes.

1. ``prepare`` fixes the ports (the router's from the configuration, the workers' free ones) and finds the model, so
that all children share one folder. 2. ``deployment`` starts the controller, which tells the router of the workers, and
the children; the supervisor says when they are ready. 3. The caller uses it, and ``twinpool scale`` changes the pools.
4. Leaving the block drains the router, then the workers, and leaves nothing running.

With ``controller.launcher`` ray the workers run on a Ray cluster instead: the controller is a child, like the router.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

import grpc.aio

from twinpool.child import ChildSpec
from twinpool.config import Config
from twinpool.config_loader import to_environment
from twinpool.controller.fleet import ROLES, Role
from twinpool.controller.local_fleet import LocalFleet
from twinpool.controller.pool import Pool
from twinpool.controller.service import NAME as SERVICE
from twinpool.controller.service import serve
from twinpool.errors import ConfigError
from twinpool.model_source import model_name, resolve_model
from twinpool.port_picker import PortPicker
from twinpool.progress import Progress
from twinpool.proto import controller_pb2, controller_pb2_grpc
from twinpool.rpc import Dialer, dialled
from twinpool.run_token import drop_stale, drop_token, keep_token
from twinpool.supervisor import Supervisor
from twinpool.tls import ClientTls, client_tls, internal_client

_INFERENCE = "twinpool.inference.v1.InferenceService"
_WORKER = "twinpool.worker.v1.WorkerService"
# What a process may need beyond its drain to end.
_EXIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Deployment:
    """A running deployment; ``config`` holds the ports in use and the model's name."""

    config: Config
    supervisor: Supervisor
    ready_s: float

    @property
    def grpc_address(self) -> str:
        """Where clients dial (host:port)."""
        return f"{dialled(self.config.router.host)}:{self.config.router.grpc_port}"

    @property
    def controller_address(self) -> str:
        """Where ``twinpool scale`` dials (host:port)."""
        return f"{dialled(self.config.controller.host)}:{self.config.controller.known_port}"

    @property
    def admin_address(self) -> str:
        """Where ``twinpool drain``, ``flush-cache`` and ``log-level`` dial (host:port)."""
        return f"127.0.0.1:{self.config.router.known_admin_port}"

    @property
    def http_url(self) -> str:
        """Base of the HTTP surface."""
        scheme = "https" if self.config.tls.is_public else "http"
        return f"{scheme}://{dialled(self.config.router.host)}:{self.config.router.http_port}"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is about to run: ports and model are fixed, nothing was started.

    ``closed`` is the configuration of the processes, with the cluster token; ``config`` is the users'.
    """

    config: Config
    closed: Config
    router: ChildSpec
    workers: Mapping[Role, tuple[ChildSpec, ...]]
    controller: ChildSpec | None = None

    @property
    def specs(self) -> tuple[ChildSpec, ...]:
        """All processes, the router first: it is drained first."""
        controller = [] if self.controller is None else [self.controller]
        return (self.router, *controller, *(spec for role in ROLES for spec in self.workers[role]))


def prepare(config: Config, progress: Progress) -> Plan:
    """Finds the model and the ports. Blocks while a model is downloaded.

    Raises:
        ConfigError: no such model, a port in use, pools that cannot serve.
    """
    _check_pools(config)
    with contextlib.closing(PortPicker()) as ports:
        config = _with_ports(config, ports)
        folder = resolve_model(config.model, progress)
        given = config
        model = config.model.model_copy(update={"path": str(folder), "name": model_name(config.model)})
        config = config.model_copy(update={"model": model})
        closed = _closed(config)
        here = config.controller.launcher == "local"
        counts: dict[Role, int] = {"prefill": config.prefill.replicas, "decode": config.decode.replicas}
        workers = {
            role: tuple(worker_spec(closed, ports, role, number) for number in range(counts[role] if here else 0))
            for role in ROLES
        }
        address = f"{dialled(config.router.host)}:{config.router.grpc_port}"
        router = _spec("router", "router", closed, {}, address, client_tls(closed), config.router.drain_timeout_s)
        if here:
            return Plan(config, closed, router, workers)
        model = given.model.model_copy(update={"name": model.name})  # each node finds the model for itself
        controller = _controller_spec(closed.model_copy(update={"model": model}))
        return Plan(config, closed, router, workers, controller)


@contextlib.asynccontextmanager
async def deployment(
    plan: Plan, log: Callable[[str, str], None], report: Callable[[str], None]
) -> AsyncIterator[Deployment]:
    """Runs a deployment for the time of the block; entered when requests can be served.

    Args:
        plan: see ``prepare``.
        log: takes (process, line) for every line that a process prints.
        report: takes a line about a process that ended or came back.

    Raises:
        ChildFailed: a process ended before it was ready.
    """
    started = time.monotonic()
    supervisor = Supervisor(plan.specs, log, report)
    workers = _local_workers(plan, supervisor, report) if plan.controller is None else _ray_workers(plan, supervisor)
    async with workers:
        yield Deployment(plan.config, supervisor, time.monotonic() - started)


@contextlib.asynccontextmanager
async def _local_workers(plan: Plan, supervisor: Supervisor, report: Callable[[str], None]) -> AsyncIterator[None]:
    fleet = LocalFleet(plan.closed, supervisor, functools.partial(_one_spec, plan.closed))
    for role in ROLES:
        for number, spec in enumerate(plan.workers[role]):
            fleet.started(role, number, spec)
    pools = {role: Pool(role, fleet, len(plan.workers[role])) for role in ROLES}
    controller = await serve(plan.closed, fleet, pools)
    _keep_token(plan, report)
    keeping: list[asyncio.Task[None]] = []
    try:
        supervisor.start()
        await supervisor.ready()
        keeping = [asyncio.create_task(pool.run()) for pool in pools.values()]
        await controller.set_serving(SERVICE, True)
        yield
    finally:
        for task in keeping:
            task.cancel()
        await asyncio.gather(*keeping, return_exceptions=True)
        await supervisor.stop()
        await controller.stop(0)
        for port in _token_ports(plan):
            drop_token(port)


@contextlib.asynccontextmanager
async def _ray_workers(plan: Plan, supervisor: Supervisor) -> AsyncIterator[None]:
    try:
        supervisor.start()
        await supervisor.ready()
        yield
    finally:
        try:
            await supervisor.remove(plan.router.name)
            await _clear(plan.closed)
        finally:
            await supervisor.stop()


async def _clear(config: Config) -> None:
    """Ends the workers on the Ray cluster; if nobody can, the next controller takes them up."""
    address = f"{dialled(config.controller.host)}:{config.controller.known_port}"
    async with Dialer.of(config).channel(address) as opened:
        with contextlib.suppress(grpc.aio.AioRpcError):
            await controller_pb2_grpc.ControllerServiceStub(opened).Clear(controller_pb2.ClearRequest())


def _keep_token(plan: Plan, report: Callable[[str], None]) -> None:
    token = plan.closed.session.token
    if token is None or token == plan.config.session.token:
        return
    try:
        drop_stale()
        for port in _token_ports(plan):
            keep_token(port, token)
    except OSError as error:
        report(f"operators' commands will not find the cluster token ({error}); set TWINPOOL_SESSION__TOKEN for both")


def _token_ports(plan: Plan) -> tuple[int, int]:
    """The ports at which operators' commands look for the token."""
    return plan.config.controller.known_port, plan.config.router.known_admin_port


def _closed(config: Config) -> Config:
    """The processes' own configuration: with a cluster token for this run, unless one is set."""
    if config.session.token is not None:
        return config
    session = config.session.model_copy(update={"token": secrets.token_urlsafe(24)})
    return config.model_copy(update={"session": session})


def _check_pools(config: Config) -> None:
    if config.decode.replicas == 0:
        raise ConfigError("decode.replicas is 0, so nothing could generate; set it to 1 or more (--decode-replicas)")
    if config.router.disaggregate == "always" and config.prefill.replicas == 0:
        raise ConfigError(
            "router.disaggregate is always but prefill.replicas is 0; add prefill workers (--prefill-replicas) "
            "or set --disaggregate never"
        )
    if config.controller.launcher == "ray" and config.session.token is None:
        raise ConfigError(
            "workers on Ray outlive `twinpool up` if it is killed, so they need a token that lasts; set "
            "TWINPOOL_SESSION__TOKEN"
        )
    if config.router.workers:
        raise ConfigError(
            "router.workers is set, but `twinpool up` starts its own workers; leave it out, or run the router alone "
            "(twinpool serve router)"
        )


def _with_ports(config: Config, ports: PortPicker) -> Config:
    """Fixes the ports of the router and the controller, and lets the router ask the controller for workers."""
    router, controller = config.router, config.controller
    stop_or = "stop the program that uses it, or choose another port"
    picked = {
        "grpc_port": ports.take(router.host, router.grpc_port, "router.grpc_port", f"{stop_or} (--grpc-port)"),
        "http_port": ports.take(router.host, router.http_port, "router.http_port", f"{stop_or} (--http-port)"),
    }
    # Ports that nobody asked for stand in nobody's way: several deployments need but two flags each.
    take = ports.prefer if router.admin_port is None else ports.take
    admin = 0 if router.admin_port is None and router.grpc_port == 0 else router.known_admin_port
    picked["admin_port"] = take("127.0.0.1", admin, "router.admin_port", f"{stop_or} (--set router.admin_port=0)")
    take = ports.prefer if controller.port is None else ports.take
    wanted = 0 if controller.port is None and router.grpc_port == 0 else controller.known_port
    port = take(controller.host, wanted, "controller.port", f"{stop_or} (--controller-port)")
    updates = {
        "router": router.model_copy(update={**picked, "discovery": "controller"}),
        "controller": controller.model_copy(update={"port": port}),
    }
    return config.model_copy(update=updates)


def _one_spec(config: Config, role: Role, number: int) -> ChildSpec:
    """A worker beside those that run."""
    with contextlib.closing(PortPicker()) as ports:
        return worker_spec(config, ports, role, number)


def worker_spec(config: Config, ports: PortPicker, role: Role, number: int) -> ChildSpec:
    """Worker ``number`` of a pool as a child of this process, on ports that are free here.

    Raises:
        ConfigError: a configured port is in use.
    """
    pool = config.prefill if role == "prefill" else config.decode
    name = f"{pool.worker_id or role}-{number}"
    port = _pool_port(ports, pool.host, pool.port, number, f"{role}.port")
    values = {f"{role}.worker_id": name, f"{role}.port": str(port)}
    if role == "prefill":
        values["prefill.kv_port"] = str(_pool_port(ports, pool.host, pool.kv_port, number, "prefill.kv_port"))
    if pool.health_port is not None:
        health_port = _pool_port(ports, pool.host, pool.health_port, number, f"{role}.health_port")
        values[f"{role}.health_port"] = str(health_port)
    address = f"{dialled(pool.host)}:{port}"
    drain_s = pool.drain_timeout_s + config.transport.read_timeout_s  # it serves reads of promised KV to their end
    return _spec(name, role, config, values, address, internal_client(config.tls), drain_s)


def _controller_spec(config: Config) -> ChildSpec:
    address = f"{dialled(config.controller.host)}:{config.controller.known_port}"
    spec = _spec("controller", "controller", config, {}, address, internal_client(config.tls), 0)
    return dataclasses.replace(spec, service=SERVICE)


def _pool_port(ports: PortPicker, host: str, first: int, index: int, key: str) -> int:
    return ports.take(host, first + index if first else 0, key, f"set {key} to 0 for a free one")


def _spec(
    name: str,
    role: str,
    config: Config,
    values: dict[str, str],
    address: str,
    tls: ClientTls | None,
    drain_timeout_s: float,
) -> ChildSpec:
    # -P keeps the working directory off the import path: its kernels/ and proto/ must not shadow other packages.
    argv = [sys.executable, "-P", "-m", "twinpool", "serve", role]
    for key, value in values.items():
        argv += ["--set", f"{key}={value}"]
    # The rest travels in the environment, where other users of the machine do not see the cluster token.
    inherited = {name: value for name, value in os.environ.items() if not _configures(name)}
    return ChildSpec(
        name=name,
        argv=tuple(argv),
        environment={**inherited, **to_environment(config), "PYTHONUNBUFFERED": "1"},
        address=address,
        service=_INFERENCE if role == "router" else _WORKER,
        drain_s=drain_timeout_s + _EXIT_S,
        tls=tls,
    )


def _configures(variable: str) -> bool:
    return variable == "TWINPOOL_CONFIG" or (variable.startswith("TWINPOOL_") and "__" in variable)
