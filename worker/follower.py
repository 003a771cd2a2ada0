"""A node that lends itself to the ranks of one worker: ``twinpool serve follower``.

1. It waits for the worker's Ray head to listen, with a growing pause, and joins it with a Ray node (``ray_node``).
   Health turns SERVING.
2. When the node ends, because the head is gone, or at SIGTERM: health turns NOT_SERVING, the node is ended.
3. Ranks on this machine are the heirs of this process, and do not need Ray: it stays until the last has ended, which
   they do with rank 0. A second signal does not wait.
4. Exit code 0 after a signal, else 1: a supervisor starts it again, and it waits for the next head.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import random
import signal
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

from twinpool.config import Config
from twinpool.errors import ConfigError
from twinpool.rpc import RpcServer
from twinpool.worker.addresses import check_closed
from twinpool.worker.ray_environment import node_environment
from twinpool.worker.ray_session import kill_session

log = logging.getLogger(__name__)

SERVICE = "twinpool.Follower"
"""The name under which health tells whether the node has joined."""
FIRST_DELAY_S = 0.2
MAX_DELAY_S = 5.0
_PR_SET_CHILD_SUBREAPER = 36

T = TypeVar("T")


def run(config: Config) -> int:
    """Serves until a signal or the head's end; returns the exit code. Raises ConfigError if it cannot start."""
    return asyncio.run(_serve(config))


async def _serve(config: Config) -> int:
    head = config.ray.address
    if head is None or not head.rpartition(":")[2].isdecimal():
        raise ConfigError(f"a follower needs its worker's Ray head as host:port, not {head}; set ray.address (--head)")
    check_closed(config.follower.host, config.session.token, "follower.host")
    _inherit_orphans()
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, lambda: (hurry if stop.is_set() else stop).set())
    server = await RpcServer.start(config.follower.host, config.follower.port, [], config.session.token)
    await server.set_serving(SERVICE, False)
    try:
        node = await _unless(stop, _join(config, head))
        if node is not None:
            log.info("joined the Ray head at %s", head)
            await server.set_serving(SERVICE, True)
            await _unless(stop, node.wait())
            await server.set_serving(SERVICE, False)
            log.info("leaving" if stop.is_set() else f"the Ray head at {head} is gone; leaving when no rank is left")
            await _end(node)
            await _unless(hurry, asyncio.to_thread(_reap))
    finally:
        await server.stop(0.0)
    return 0 if stop.is_set() else 1


async def _join(config: Config, head: str) -> asyncio.subprocess.Process:
    """A node that has joined ``head``; comes back when that worked."""
    host, _, port = head.rpartition(":")
    delay_s = FIRST_DELAY_S
    waiting = False
    while True:
        try:
            _, writer = await asyncio.open_connection(host, int(port))
            address = writer.get_extra_info("peername")[0]  # Ray takes no names
            writer.close()
        except OSError as error:
            if not waiting:
                log.info("waiting for the Ray head at %s (%s)", head, error)
            waiting = True
        else:
            node = await _start_node(config, f"[{address}]:{port}" if ":" in address else f"{address}:{port}")
            assert node.stdout is not None
            try:
                if (await node.stdout.readline()).startswith(b"ready"):
                    return node
            except asyncio.CancelledError:
                await asyncio.shield(_end(node))
                raise
            await _end(node)
            log.warning("this node could not join the Ray head at %s, trying again; is session.token the same?", head)
        await asyncio.sleep(delay_s * random.uniform(0.75, 1.25))
        delay_s = min(MAX_DELAY_S, delay_s * 2)


async def _start_node(config: Config, head: str) -> asyncio.subprocess.Process:
    argv = [sys.executable, "-P", "-m", "twinpool.worker.ray_node", "--host", config.follower.host, "--join", head]
    argv += ["--object-store-mib", str(config.ray.object_store_mib)]
    if config.ray.node_cpus is not None:
        argv += ["--cpus", str(config.ray.node_cpus)]
    return await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=node_environment(config, config.follower.host),
    )


async def _end(node: asyncio.subprocess.Process) -> None:
    assert node.stdin is not None
    node.stdin.close()
    await node.wait()
    await asyncio.to_thread(kill_session, node.pid)


async def _unless(event: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of ``work``, or None if ``event`` came first; then ``work`` is cancelled."""
    task, asked = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait([task, asked], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.wait([task])
        return None
    finally:
        asked.cancel()


def _inherit_orphans() -> None:
    """Makes this process the parent of processes below it whose parents die: the ranks."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def _reap() -> None:
    """Returns when this process has no children any more."""
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return
