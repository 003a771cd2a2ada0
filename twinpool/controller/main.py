"""``twinpool serve controller``: keeps the pools at their sizes on a Ray cluster.

1. It joins the cluster, again and again until there is one, and takes up the replicas that run. 2. It serves routers
and ``twinpool scale``, and keeps the sizes. 3. SIGTERM ends it and leaves the replicas running: the next controller
takes them up. When its Ray client dies with the cluster's head, so does this process; whoever supervises it starts it
again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Mapping

from twinpool.config import Config
from twinpool.controller.fleet import ROLES, Role
from twinpool.controller.pool import Pool
from twinpool.controller.ray_fleet import RayFleet
from twinpool.controller.service import NAME, serve
from twinpool.errors import Unavailable

log = logging.getLogger(__name__)

_FIRST_PAUSE_S, _MAX_PAUSE_S = 1.0, 30.0


def run(config: Config) -> int:
    """Runs until a signal; returns the exit code.

    Raises:
        ConfigError: the port is in use, or no cluster is named.
    """
    return asyncio.run(_until_signal(config))


async def _until_signal(config: Config) -> int:
    serving = asyncio.create_task(_serve(config))
    _cancel_by_signal(serving)
    with contextlib.suppress(asyncio.CancelledError):
        await serving
    return 0


def _cancel_by_signal(task: asyncio.Task[None]) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)


async def _serve(config: Config) -> None:
    fleet = RayFleet(config)
    try:
        sizes = await _connect(fleet)
        this = asyncio.current_task()
        assert this is not None
        _cancel_by_signal(this)  # again: Ray has put a handler that prints a stack in front
        pools = {role: Pool(role, fleet, sizes[role]) for role in ROLES}
        server = await serve(config, fleet, pools)
        try:
            await server.set_serving(NAME, True)
            log.info("controller on port %d, sizes %s", server.port, sizes)
            async with asyncio.TaskGroup() as group:
                for pool in pools.values():
                    group.create_task(pool.run())
                    group.create_task(_record(fleet, pool, pools))
        finally:
            await server.stop(0)
    finally:
        if not await fleet.close():
            logging.shutdown()
            os._exit(0)  # the interpreter would wait for the thread, and so for the head


async def _connect(fleet: RayFleet) -> Mapping[Role, int]:
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            await fleet.connect()
            return await fleet.recorded_sizes()
        except Unavailable as error:
            log.warning("%s; trying again in %g s", error.message, pause_s)
            await fleet.close()
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _MAX_PAUSE_S)


async def _record(fleet: RayFleet, changing: Pool, pools: Mapping[Role, Pool]) -> None:
    while True:
        await changing.wait_retargeted()
        try:
            await fleet.record_sizes({role: pool.target for role, pool in pools.items()})
        except Unavailable as error:
            log.warning("the new sizes are not kept for the next controller: %s", error.message)
