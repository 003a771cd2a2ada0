"""Starts a whole deployment on this machine: one router, a prefill pool and a decode pool, as separate processes.

1. ``prepare`` fixes the ports (the router's from the configuration, the workers' free ones) and finds the model, so
that all children share one folder. 2. ``deployment`` starts the children; the supervisor says when they are ready.
3. The caller uses it. 4. Leaving the block drains the router, then the workers, and leaves nothing running.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from twinpool.config import Config
from twinpool.config_loader import to_environment
from twinpool.errors import ConfigError
from twinpool.model_source import model_name, resolve_model
from twinpool.port_picker import PortPicker
from twinpool.progress import Progress
from twinpool.rpc import dialled
from twinpool.supervisor import ChildSpec, Supervisor
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
    def http_url(self) -> str:
        """Base of the HTTP surface."""
        scheme = "https" if self.config.tls.is_public else "http"
        return f"{scheme}://{dialled(self.config.router.host)}:{self.config.router.http_port}"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is about to run: ports and model are fixed, nothing was started."""

    config: Config
    specs: tuple[ChildSpec, ...]


def prepare(config: Config, progress: Progress) -> Plan:
    """Finds the model and the ports. Blocks while a model is downloaded.

    Raises:
        ConfigError: no such model, a port in use, pools that cannot serve.
    """
    _check_pools(config)
    with contextlib.closing(PortPicker()) as ports:
        config = _with_router_ports(config, ports)
        folder = resolve_model(config.model, progress)
        model = config.model.model_copy(update={"path": str(folder), "name": model_name(config.model)})
        config = config.model_copy(update={"model": model})
        return Plan(config, tuple(_specs(_closed(config), ports)))


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
    try:
        supervisor.start()
        await supervisor.ready()
        yield Deployment(plan.config, supervisor, time.monotonic() - started)
    finally:
        await supervisor.stop()


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
    if config.router.workers:
        raise ConfigError(
            "router.workers is set, but `twinpool up` starts its own workers; leave it out, or run the router alone "
            "(twinpool serve router)"
        )


def _with_router_ports(config: Config, ports: PortPicker) -> Config:
    router = config.router
    stop_or = "stop the program that uses it, or choose another port"
    picked = {
        "grpc_port": ports.take(router.host, router.grpc_port, "router.grpc_port", f"{stop_or} (--grpc-port)"),
        "http_port": ports.take(router.host, router.http_port, "router.http_port", f"{stop_or} (--http-port)"),
    }
    return config.model_copy(update={"router": router.model_copy(update=picked)})


def _specs(config: Config, ports: PortPicker) -> list[ChildSpec]:
    """The router first: it is drained first."""
    workers: list[ChildSpec] = []
    for role, pool in (("prefill", config.prefill), ("decode", config.decode)):
        for index in range(pool.replicas):
            port = _pool_port(ports, pool.host, pool.port, index, f"{role}.port")
            values = {f"{role}.worker_id": f"{pool.worker_id or role}-{index}", f"{role}.port": str(port)}
            if role == "prefill":
                kv_port = _pool_port(ports, pool.host, pool.kv_port, index, f"{role}.kv_port")
                values[f"{role}.kv_port"] = str(kv_port)
            if pool.health_port is not None:
                health_port = _pool_port(ports, pool.host, pool.health_port, index, f"{role}.health_port")
                values[f"{role}.health_port"] = str(health_port)
            address = f"{dialled(pool.host)}:{port}"
            tls = internal_client(config.tls)
            workers.append(_spec(f"{role}-{index}", role, config, values, address, tls, pool.drain_timeout_s))
    addresses = ",".join(spec.address for spec in workers)
    router_address = f"{dialled(config.router.host)}:{config.router.grpc_port}"
    router_drain_s = config.router.drain_timeout_s
    values = {"router.workers": addresses}
    router = _spec("router", "router", config, values, router_address, client_tls(config), router_drain_s)
    return [router, *workers]


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
