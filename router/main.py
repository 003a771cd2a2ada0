"""The router process: runs until SIGTERM or SIGINT, then drains."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
from pathlib import Path

from twinpool.config import Config
from twinpool.router.app import Router

log = logging.getLogger(__name__)


def run(config: Config, model_folder: Path) -> int:
    """Serves until a signal; returns the exit code (0 when every request in flight could finish).

    Raises:
        ConfigError: a port is in use, or the model folder is unusable; nothing was started.
    """
    _allow_files()
    return asyncio.run(_serve(config, model_folder))


def _allow_files() -> None:
    """A connection is an open file: takes as many as the system lets this process have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _serve(config: Config, model_folder: Path) -> int:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    router = await Router.start(config, model_folder)
    await stopping.wait()
    log.info("router drains, for at most %g s", config.router.drain_timeout_s)
    if await router.stop():
        return 0
    log.warning("requests were cut off: they did not end within router.drain_timeout_s")
    return 1
