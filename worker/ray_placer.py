"""The process that talks to Ray for one worker, so that Ray's end is not the worker's.

1. Rank 0 starts it with one end of a channel (``ray_messages``). Without ``ray.address`` it first starts a head.
2. It reserves a placement group, or finds the given one, starts one actor per rank other than 0, says ``Placed``, and
   reports each rank that ends.
3. When the channel ends, rank 0 is gone or done: it ends, and with its job Ray ends the actors and frees the group.
   A head of ours ends with it. When Ray ends first, this process ends and nobody is hurt: ranks do not need it.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from twinpool.config import Config
from twinpool.engine.channel import Channel, ChannelClosed, SocketChannel
from twinpool.errors import ConfigError
from twinpool.logs import setup_logging
from twinpool.worker.rank_keeper import Placement
from twinpool.worker.ray_environment import node_environment
from twinpool.worker.ray_messages import TO_PLACER, Ended, Failed, Place, Placed, Stop
from twinpool.worker.ray_placement import bundle_of_ranks, rank_needs, ranks_per_bundle, room
from twinpool.worker.ray_rank import RankActor
from twinpool.worker.ray_session import kill_session

log = logging.getLogger("twinpool.worker.ray_placer")

LOOK_INTERVAL_S = 0.25
"""How often the nodes of a cluster are looked at while too few have joined; Ray offers no event."""
NODE_ID_LABEL = "ray.io/node-id"


class Placer:
    """Places the ranks of one worker; see the module."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._ray = place.config.ray
        self._pool = place.config.prefill if place.role == "prefill" else place.config.decode
        self._needs = rank_needs(self._ray, place.use_gpu)
        self._size = self._pool.tp_size * self._pool.pp_size
        self._actors: dict[int, Any] = {}
        self._waits: dict[Any, int] = {}

    def start(self) -> str | None:
        """Starts all ranks; returns the GPUs of rank 0, if this reserved any.

        Raises:
            ConfigError: there is no room.
            RayError: Ray fails.
        """
        deadline = time.monotonic() + self._ray.placement_timeout_s
        given = self._ray.placement_group
        group = self._reserve(deadline) if given is None else _find(given, self._ray.namespace)
        if not group.wait(max(1.0, deadline - time.monotonic())):
            raise ConfigError(
                f"no room for {self._size} ranks of {self._needs} each within {self._ray.placement_timeout_s:.0f} s; "
                "stop something else on these nodes, or add nodes"
            )
        bundles = placement_group_table(group)["bundles"]
        indices = bundle_of_ranks([bundles[index] for index in sorted(bundles)], self._needs, self._size)
        for rank in self._place.tokens:
            self._actors[rank] = self._actor(group, indices[rank])
        holder = self._actor(group, 0) if given is None and self._place.use_gpu else None
        if holder is not None:
            self._actors[0] = holder
        ray.get([actor.start.remote(self._placement(rank)) for rank, actor in self._actors.items() if rank])
        self._waits = {actor.wait.remote(): rank for rank, actor in self._actors.items() if rank}
        return None if holder is None else str(ray.get(holder.gpus.remote()))

    def report(self, channel: Channel) -> None:
        """Says which ranks end, until none is left."""
        while self._waits:
            (done,), _ = ray.wait(list(self._waits), num_returns=1)
            rank = self._waits.pop(done)
            try:
                how = ray.get(done)
            except RayError as error:
                how = f"its Ray actor ended ({error})"
            channel.send(Ended(rank=rank, how=how).encode())

    def stop(self, rank: int) -> None:
        """Kills a rank."""
        if rank in self._actors:
            self._actors[rank].stop.remote()

    def _placement(self, rank: int) -> str:
        place = self._place
        return Placement(rank, place.host, place.port, place.tokens[rank]).encode()

    def _actor(self, group: PlacementGroup, bundle: int) -> Any:
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        options = {"num_cpus": self._needs["CPU"], "num_gpus": self._needs.get("GPU", 0.0)}
        return ray.remote(RankActor).options(max_concurrency=2, scheduling_strategy=strategy, **options).remote()

    def _reserve(self, deadline: float) -> PlacementGroup:
        own = ray.get_runtime_context().get_node_id()
        labels = dict(label.split("=", 1) for label in self._pool.node_labels)
        counts = self._wait_for_nodes(own, labels, deadline)
        bundles = [{name: amount * count for name, amount in self._needs.items()} for count in counts]
        selectors = [{NODE_ID_LABEL: own}, *[labels] * (len(bundles) - 1)]
        log.info("placing %d ranks as %d bundles", self._size, len(bundles))
        return placement_group(bundles, strategy="PACK", bundle_label_selector=selectors)

    def _wait_for_nodes(self, own: str, labels: Mapping[str, str], deadline: float) -> list[int]:
        while True:
            fitting = {
                node["NodeID"]: room(node["Resources"], self._needs)
                for node in ray.nodes()
                if node["Alive"] and (node["NodeID"] == own or labels.items() <= node["Labels"].items())
            }
            mine = fitting.pop(own, 0)
            counts = ranks_per_bundle(self._pool.tp_size, self._pool.pp_size, mine, list(fitting.values()))
            if counts is not None:
                return counts
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"{self._size} ranks of {self._needs} each do not fit after {self._ray.placement_timeout_s:.0f} s: "
                    f"{mine} on the node of rank 0 and {sum(fitting.values())} on {len(fitting)} other nodes; "
                    "add nodes (twinpool serve follower), or lower tp_size, pp_size or ray.cpus_per_rank"
                )
            time.sleep(LOOK_INTERVAL_S)


def _find(name: str, namespace: str) -> PlacementGroup:
    try:
        return ray.util.get_placement_group(name)
    except ValueError as error:
        raise ConfigError(
            f"Ray namespace {namespace} has no placement group {name} (ray.placement_group); create it first"
        ) from error


def _launch_head(config: Config, host: str) -> subprocess.Popen[bytes]:
    """A head on ``host``; it ends with its standard input."""
    argv = [sys.executable, "-P", "-m", "twinpool.worker.ray_node", "--host", host]
    argv += ["--head-port", str(config.ray.head_port), "--object-store-mib", str(config.ray.object_store_mib)]
    if config.ray.node_cpus is not None:
        argv += ["--cpus", str(config.ray.node_cpus)]
    environment = node_environment(config, host)
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)


def _head_address(head: subprocess.Popen[bytes], place: Place) -> str:
    """Waits until the head runs. Raises ConfigError if it does not."""
    assert head.stdout is not None
    word, _, address = head.stdout.readline().decode().strip().partition(" ")
    if word != "ready":
        raise ConfigError(
            f"the Ray head does not start on {place.host}:{place.config.ray.head_port}; its own words are above; "
            "if the port is in use, set ray.head_port"
        )
    return address


def main() -> None:
    """Entry point: the file descriptor of the channel is the argument. Does not return."""
    channel = SocketChannel(socket.socket(fileno=int(sys.argv[1])))
    place = TO_PLACER.validate_json(channel.receive())
    assert isinstance(place, Place)
    setup_logging(place.config.logging)
    placer = Placer(place)
    heads: list[subprocess.Popen[bytes]] = []
    threading.Thread(target=_follow, args=(channel, placer, heads), name="rank-0", daemon=True).start()
    try:
        address = place.config.ray.address
        own = {} if address is not None else {"_node_ip_address": place.host}
        if address is None:
            heads.append(_launch_head(place.config, place.host))
            address = _head_address(heads[0], place)
            log.info("Ray head at %s", address)
        ray.init(address=address, namespace=place.config.ray.namespace, configure_logging=False, **own)
        gpus = placer.start()
    except ConfigError as error:
        channel.send(Failed(message=error.message).encode())
    except (RayError, ConnectionError, RuntimeError, OSError) as error:
        channel.send(Failed(message=f"Ray: {error}").encode())
    else:
        channel.send(Placed(gpus=gpus).encode())
        placer.report(channel)
    threading.Event().wait()  # rank 0 closes the channel


def _follow(channel: Channel, placer: Placer, heads: list[subprocess.Popen[bytes]]) -> None:
    try:
        while True:
            message = TO_PLACER.validate_json(channel.receive())
            if isinstance(message, Stop):
                placer.stop(message.rank)
    except ChannelClosed:
        for head in heads:
            assert head.stdin is not None
            head.stdin.close()
            head.wait()  # so that who starts this worker again finds the port free
            kill_session(head.pid)
        os._exit(0)


if __name__ == "__main__":
    main()
