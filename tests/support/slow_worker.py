"""``twinpool`` with a worker that loses 0.3 s in one stage, once per signal; which stage depends on signal and role.

prefill: SIGUSR1 the queue, SIGUSR2 the computation. decode: SIGUSR1 the transfer, SIGUSR2 the queue.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from twinpool.cli.main import main
from twinpool.engine.commands import Command, RemoteLoaded, Submit
from twinpool.engine.core import Engine
from twinpool.engine.runner import ModelRunner
from twinpool.kv_transfer.connectors.nixl import NixlLink

DELAY_S = 0.3
first, second = threading.Event(), threading.Event()


def lose(event: threading.Event) -> None:
    """Sleeps if the signal came."""
    if event.is_set():
        event.clear()
        time.sleep(DELAY_S)


def delayed(function: Callable[..., Any], event: threading.Event) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        lose(event)
        return function(*args, **kwargs)

    return wrapper


handle = Engine._handle


def handle_then_wait(engine: Engine, command: Command, now: float) -> None:
    """The request has arrived, and is looked at only later."""
    handle(engine, command, now)
    if isinstance(command, Submit):
        lose(first)


def wait_then_handle(engine: Engine, command: Command, now: float) -> None:
    """The KV is confirmed, and the engine is busy."""
    if isinstance(command, RemoteLoaded):
        lose(second)
    handle(engine, command, now)


if __name__ == "__main__":
    if "prefill" in sys.argv:
        ModelRunner.forward = delayed(ModelRunner.forward, second)  # type: ignore[method-assign]
        Engine._handle = handle_then_wait  # type: ignore[method-assign]
    else:
        NixlLink.read = delayed(NixlLink.read, first)  # type: ignore[method-assign]
        Engine._handle = wait_then_handle  # type: ignore[method-assign]
    signal.signal(signal.SIGUSR1, lambda number, frame: first.set())
    signal.signal(signal.SIGUSR2, lambda number, frame: second.set())
    main()
