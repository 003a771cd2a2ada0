"""Workers on a Ray cluster: one placement group and one detached actor for each, on nodes with the pool's labels.

1. ``connect`` joins the cluster and takes up the replicas that run: an earlier controller's that are ready. What that
   one left half started or draining is ended.
2. ``add`` reserves a bundle per rank and starts the actor on the first; see ``ray_replica``.
3. A replica that ends by itself, as a whole, or with its node, is taken off the list and its group is removed; its
   pool starts another one. Nothing is polled: each replica has a call that returns when its worker has ended.
4. ``close`` leaves the cluster; the replicas run on.

Calls to Ray's head run off the loop's thread, because they block while it is away. Names: an actor is called like its
worker, its group like that behind the namespace. The sizes that ``twinpool scale`` set are kept by the head.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
import ray.exceptions
import ray.util
from ray.experimental import internal_kv
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from twinpool.config import Config, PoolSection
from twinpool.config_loader import to_environment
from twinpool.controller.fleet import ROLES, Replica, Role
from twinpool.controller.ray_replica import Description, RayReplica
from twinpool.errors import ConfigError, Unavailable

log = logging.getLogger(__name__)

T = TypeVar("T")

_NAME = re.compile(r"(prefill|decode)-(\d+)")
_ADOPT_S = 20.0
_CLOSE_S = 3.0


@dataclass(frozen=True, slots=True)
class _Placed:
    """A replica's actor and the name of its placement group."""

    actor: Any
    group: str


class RayFleet:
    """A ``Fleet``; see there and the module docstring."""

    def __init__(self, config: Config) -> None:
        if config.ray.address is None:
            raise ConfigError("ray.address is not set; give the cluster's (host:6379, as `ray start --head` prints it)")
        self._config = config
        self._pools: Mapping[Role, PoolSection] = {"prefill": config.prefill, "decode": config.decode}
        self._replicas: dict[Role, list[Replica]] = {role: [] for role in ROLES}
        self._placed: dict[str, _Placed] = {}
        self._next: dict[Role, int] = dict.fromkeys(ROLES, 0)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._change = asyncio.Event()

    async def connect(self) -> None:
        """Joins the cluster and takes up what runs there.

        Raises:
            Unavailable: there is no cluster at the address, or it has no node on this machine.
        """
        await self._ask(self._join)
        names = await self._ask(lambda: ray.util.list_named_actors(all_namespaces=True))
        ours = [str(item["name"]) for item in names if item["namespace"] == self._config.ray.namespace]
        numbers = {name: int(match[2]) for name in ours if (match := _NAME.fullmatch(name))}
        await asyncio.gather(*map(self._adopt, numbers))
        for replicas in self._replicas.values():
            replicas.sort(key=lambda replica: numbers[replica.worker_id])
        groups = await self._ask(ray.util.placement_group_table)
        for group in groups.values():
            if self._is_ours(group["name"]) and group["state"] != "REMOVED" and group["name"] not in self._groups:
                await self._ask(lambda name=group["name"]: self._remove(None, name))  # type: ignore[misc]

    async def close(self) -> bool:
        """Leaves the cluster; False when a call to Ray still blocks a thread, because the head is away."""
        tasks = [*self._tasks.values(), *self._ending]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()
        self._placed.clear()
        for replicas in self._replicas.values():
            replicas.clear()
        try:
            async with asyncio.timeout(_CLOSE_S):
                await asyncio.to_thread(ray.shutdown)
        except TimeoutError:
            return False
        return True

    def replicas(self, role: Role) -> Sequence[Replica]:
        """See ``Fleet``."""
        return tuple(self._replicas[role])

    async def wait_changed(self) -> None:
        """See ``Fleet``."""
        await self._change.wait()

    async def add(self, role: Role) -> Replica:
        """See ``Fleet``."""
        number = self._next[role]
        self._next[role] += 1
        name = f"{role}-{number}"
        placed: _Placed | None = None
        try:
            placed = await self._ask(lambda: self._place(role, number))
            await self._until_placed(role, placed)
            return self._take_up(await self._call(placed.actor.start.remote()), placed)
        except BaseException:
            await asyncio.shield(self._end(placed.actor if placed is not None else None, self._group(name)))
            raise

    def retire(self, replica: Replica) -> None:
        """See ``Fleet``."""
        self._tasks.pop(replica.worker_id).cancel()
        self._replicas[replica.role].remove(replica)
        self._changed()

    async def drain(self, replica: Replica) -> None:
        """See ``Fleet``."""
        placed = self._placed.pop(replica.worker_id)
        await self._end(placed.actor, placed.group)

    async def capacity(self, role: Role) -> int:
        """See ``Fleet``; counts what is not reserved by placement groups on the nodes with the pool's labels."""
        nodes, groups = await self._ask(lambda: (ray.nodes(), ray.util.placement_group_table()))
        bundle = self._bundle(role, nodes)
        free = {node["NodeID"]: dict(node["Resources"]) for node in self._nodes(role, nodes)}
        for group in groups.values():
            for index, node in group["bundles_to_node_id"].items() if group["state"] == "CREATED" else ():
                for resource, amount in group["bundles"][index].items():
                    if node in free:
                        free[node][resource] = free[node].get(resource, 0) - amount
        ranks = sum(
            math.floor(min(resources.get(name, 0) / amount for name, amount in bundle.items()) + 1e-9)
            for resources in free.values()
        )
        return len(self._replicas[role]) + int(ranks) // _ranks(self._pools[role])

    async def recorded_sizes(self) -> Mapping[Role, int]:
        """The sizes to begin with: those set last, unless the configuration has changed since."""
        configured = {role: self._pools[role].replicas for role in ROLES}
        text = await self._ask(lambda: internal_kv._internal_kv_get(self._key))
        record = json.loads(text) if text else {}
        if record.get("configured") == configured and record["sizes"]["decode"]:
            return {role: int(record["sizes"][role]) for role in ROLES}
        return configured

    async def record_sizes(self, sizes: Mapping[Role, int]) -> None:
        """Keeps the sizes for the next controller."""
        configured = {role: self._pools[role].replicas for role in ROLES}
        text = json.dumps({"configured": configured, "sizes": dict(sizes)})
        await self._ask(lambda: internal_kv._internal_kv_put(self._key, text.encode(), overwrite=True))

    @property
    def _key(self) -> bytes:
        return f"twinpool:{self._config.ray.namespace}:sizes".encode()

    @property
    def _groups(self) -> set[str]:
        return {placed.group for placed in self._placed.values()}

    def _group(self, name: str) -> str:
        return f"{self._config.ray.namespace}.{name}"

    def _is_ours(self, group: str) -> bool:
        namespace, _, name = group.rpartition(".")
        return namespace == self._config.ray.namespace and _NAME.fullmatch(name) is not None

    def _changed(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    # On other threads, because it blocks

    def _join(self) -> None:
        section = self._config.ray
        ray.init(address=section.address, namespace=section.namespace, log_to_driver=False, logging_level="ERROR")

    def _place(self, role: Role, number: int) -> _Placed:
        name = f"{role}-{number}"
        bundle = self._bundle(role, ray.nodes())
        count = _ranks(self._pools[role])
        labels = _labels(self._pools[role])
        group = ray.util.placement_group(
            [bundle] * count,
            strategy="PACK",
            name=self._group(name),
            lifetime="detached",
            bundle_label_selector=[labels] * count,
        )
        options = {
            "name": name,
            "lifetime": "detached",
            "max_restarts": 0,
            "num_cpus": bundle["CPU"],
            "num_gpus": bundle.get("GPU", 0),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
        }
        actor = ray.remote(RayReplica).options(**options)
        environment = to_environment(self._config)
        return _Placed(actor.remote(role, number, environment, self._group(name)), self._group(name))

    def _remove(self, actor: Any, group: str) -> None:
        if actor is not None:
            ray.kill(actor)
        with contextlib.suppress(ValueError):  # there is none of that name
            ray.util.remove_placement_group(ray.util.get_placement_group(group))

    def _nodes(self, role: Role, nodes: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        labels = _labels(self._pools[role])
        return [node for node in nodes if node["Alive"] and labels.items() <= node["Labels"].items()]

    def _bundle(self, role: Role, nodes: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """What each rank reserves: a GPU where the pool's nodes have some, and processors."""
        device = self._config.model.device
        has_gpu = any(node["Resources"].get("GPU", 0) for node in self._nodes(role, nodes))
        gpu = {"GPU": 1.0} if device == "cuda" or (device == "auto" and has_gpu) else {}
        return {"CPU": self._config.ray.cpus_per_rank, **gpu}

    # Life of a replica

    async def _until_placed(self, role: Role, placed: _Placed) -> None:
        limit_s = self._config.ray.placement_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await self._call(placed.actor.node.remote())
        except TimeoutError as error:
            count, bundle = _ranks(self._pools[role]), self._bundle(role, await self._ask(ray.nodes))
            what = f"{count} times " + " and ".join(f"{amount:g} {name}" for name, amount in bundle.items())
            where = " and ".join(self._pools[role].node_labels) or "any label"
            raise Unavailable(
                f"no room for {what} on nodes with {where} for {limit_s:g} s; add or free nodes, or change "
                f"{role}.node_labels or ray.cpus_per_rank"
            ) from error

    def _take_up(self, found: Description, placed: _Placed) -> Replica:
        """Lists a replica that is ready, and follows it. Raises Unavailable: it is not."""
        if found.state != "ready":
            raise Unavailable(found.error or f"{found.worker_id} is {found.state}")
        replica = Replica(found.role, found.worker_id, found.address)
        self._replicas[found.role].append(replica)
        self._placed[found.worker_id] = placed
        self._tasks[found.worker_id] = asyncio.create_task(self._follow(replica, placed))
        self._changed()
        return replica

    async def _follow(self, replica: Replica, placed: _Placed) -> None:
        try:
            how = await self._call(placed.actor.wait.remote())
        except Unavailable as error:
            how = error.message
        log.warning("%s has ended and will be replaced: %s", replica.worker_id, how)
        del self._placed[replica.worker_id]
        this = self._tasks.pop(replica.worker_id)
        self._ending.add(this)
        this.add_done_callback(self._ending.discard)
        self._replicas[replica.role].remove(replica)
        self._changed()
        await self._end(placed.actor, placed.group)

    async def _adopt(self, name: str) -> None:
        match = _NAME.fullmatch(name)
        assert match is not None
        role: Role = "prefill" if match[1] == "prefill" else "decode"
        self._next[role] = max(self._next[role], int(match[2]) + 1)
        actor = await self._ask(lambda: ray.get_actor(name))
        try:
            async with asyncio.timeout(_ADOPT_S):
                found: Description = await self._call(actor.describe.remote())
            self._take_up(found, _Placed(actor, self._group(name)))
            log.info("took up %s at %s", name, found.address)
        except (TimeoutError, Unavailable) as error:
            log.warning("%s is ended: %s", name, error)
            await self._end(actor, self._group(name))

    async def _end(self, actor: Any, group: str) -> None:
        """Drains the worker if it lives, then frees what it reserved, once Ray's head is there to do so."""
        try:
            if actor is not None:
                await self._call(actor.drain.remote())
        except Unavailable as error:
            log.info("%s is gone: %s", group, error.message)
        try:
            await self._ask(lambda: self._remove(actor, group))
        except Unavailable as error:
            log.warning("%s could not be removed: %s", group, error.message)

    async def _ask(self, question: Callable[[], T]) -> T:
        """Runs a blocking call to Ray on another thread. Raises Unavailable: Ray cannot do it."""
        try:
            return await asyncio.to_thread(question)
        except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError) as error:
            raise Unavailable(f"Ray at {self._config.ray.address}: {_first_line(error)}") from error

    async def _call(self, reference: Any) -> Any:
        """Awaits an actor's answer. Raises Unavailable: the actor is gone."""
        try:
            return await reference
        except ray.exceptions.RayError as error:
            raise Unavailable(_first_line(error)) from error


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _labels(pool: PoolSection) -> dict[str, str]:
    return dict(label.split("=", 1) for label in pool.node_labels)


def _ranks(pool: PoolSection) -> int:
    return pool.tp_size * pool.pp_size
