"""The actor that holds one replica on its node of a Ray cluster.

1. Ray starts it on the first bundle of the replica's placement group, named after the worker and detached: it outlives
   the controller, and another controller finds it by its name.
2. ``start`` runs the worker as a child, with ports that are free on this node; the child's other ranks, if it has any,
   take the other bundles. It returns once the worker is ready or has failed.
3. ``wait`` returns when the worker has ended; ``drain`` ends it. The actor starts no second worker: a replica whose
   rank died is replaced as a whole.
4. The controller kills the actor and removes the group. An actor that dies takes its worker along, unless Ray's node
   (the raylet) has died too: then the worker serves on for ``ray.orphan_s`` before it drains. By then its replacement
   runs, if there is a cluster again. The actor follows its raylet by itself, because Ray leaves that to running calls.

The worker is a process of its own session and talks to routers and other workers only; Ray carries none of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import ray.util

from twinpool.child import Child, ChildFailed, ChildSpec
from twinpool.config import Config
from twinpool.config_loader import load
from twinpool.controller.fleet import Role
from twinpool.errors import TwinpoolError
from twinpool.launcher import worker_spec
from twinpool.parent_watch import PARENT_GRACE_S, PARENT_RUNNER
from twinpool.port_picker import PortPicker
from twinpool.rpc import dialled

State = Literal["starting", "ready", "draining", "ended"]


@dataclass(frozen=True, slots=True)
class Description:
    """What the actor says of its worker; ``error`` is how it ended."""

    role: Role
    worker_id: str
    state: State
    address: str
    error: str = ""


class RayReplica:
    """See the module docstring; all methods run on the actor's event loop."""

    def __init__(self, role: Role, number: int, environment: Mapping[str, str], group: str) -> None:
        """``environment`` holds the configuration; ``group`` names the placement group."""
        self._role: Role = role
        self._number = number
        self._config = _at_this_node(load(environ=environment).config, role, group)
        self._spec: ChildSpec | None = None
        self._child: Child | None = None
        self._life: asyncio.Task[str] | None = None
        self._draining = False

    async def node(self) -> str:
        """The address of this node; answers as soon as the actor is placed."""
        return str(ray.util.get_node_ip_address())

    async def start(self) -> Description:
        """Starts the worker, once; returns when it is ready or has ended."""
        if self._life is None:
            try:
                with contextlib.closing(PortPicker()) as ports:
                    spec = worker_spec(self._config, ports, self._role, self._number)
            except TwinpoolError as error:
                return self._describe("ended", error.message)
            raylet = os.getppid()
            asyncio.get_running_loop().add_reader(os.pidfd_open(raylet), os._exit, 1)
            grace = {PARENT_GRACE_S: str(self._config.ray.orphan_s), PARENT_RUNNER: str(raylet)}
            self._spec = replace(spec, environment={**_without_ray(spec.environment), **grace})
            self._child = Child(self._spec, _print_line, _print_report)
            self._life = asyncio.create_task(self._live(self._child))
        assert self._child is not None
        ready = asyncio.create_task(self._child.ready.wait())
        await asyncio.wait([ready, self._life], return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        return await self.describe()

    async def describe(self) -> Description:
        """The state now."""
        if self._life is None or self._child is None:
            return self._describe("starting")
        if self._life.done():
            return self._describe("ended", self._life.result())
        if self._draining:
            return self._describe("draining")
        return self._describe("ready" if self._child.ready.is_set() else "starting")

    async def wait(self) -> str:
        """Returns how the worker ended, once it has."""
        return await asyncio.shield(self._life) if self._life is not None else "it was never started"

    async def drain(self) -> str:
        """Lets the worker finish or hand over, kills it after its grace; returns how it ended."""
        self._draining = True
        if self._child is not None and self._spec is not None:
            self._child.terminate()
            await self._child.ended_within(self._spec.drain_s)
            self._child.kill()
        return await self.wait()

    async def _live(self, child: Child) -> str:
        try:
            return child.cause(await child.live())
        except ChildFailed as error:
            child.kill()
            return error.message

    def _describe(self, state: State, error: str = "") -> Description:
        pool = self._config.prefill if self._role == "prefill" else self._config.decode
        port = self._spec.address.rpartition(":")[2] if self._spec is not None else ""
        address = f"{pool.advertise or dialled(pool.host)}:{port}"
        return Description(self._role, f"{self._role}-{self._number}", state, address, error)


def _at_this_node(config: Config, role: Role, group: str) -> Config:
    """Listening at the node's own address, unless the configuration names one that others can reach."""
    pool = config.prefill if role == "prefill" else config.decode
    host = str(ray.util.get_node_ip_address()) if _is_loopback(pool.host) else pool.host
    updates = {"host": host, "worker_id": None, "launcher": "ray" if pool.tp_size * pool.pp_size > 1 else "local"}
    if pool.advertise is None and host in ("0.0.0.0", "::"):
        updates["advertise"] = str(ray.util.get_node_ip_address())
    placed = config.ray.model_copy(update={"placement_group": group})
    return config.model_copy(update={role: pool.model_copy(update=updates), "ray": placed})


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _without_ray(environment: Mapping[str, str]) -> dict[str, str]:
    """What Ray tells its own worker processes is not for the child."""
    private = ("RAY_JOB_ID", "RAY_RAYLET_PID", "RAY_SESSION", "RAY_NODE_ID", "RAY_ADDRESS")
    return {name: value for name, value in environment.items() if not name.startswith(private)}


def _print_line(name: str, line: str) -> None:
    print(f"{name} | {line}", flush=True)


def _print_report(text: str) -> None:
    print(f"twinpool: {text} (process {os.getpid()})", flush=True)
