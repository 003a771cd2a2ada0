"""``twinpool`` with a worker whose forward passes take 5 ms longer from SIGUSR1 to SIGUSR2: states last until seen."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

from twinpool.cli.main import main
from twinpool.engine.runner import ModelRunner

DELAY_S = 0.005
forward = ModelRunner.forward
unhurried = threading.Event()


def perhaps_later(runner: ModelRunner, *args: Any, **kwargs: Any) -> Any:
    if unhurried.is_set():
        time.sleep(DELAY_S)
    return forward(runner, *args, **kwargs)


if __name__ == "__main__":
    ModelRunner.forward = perhaps_later  # type: ignore[method-assign]
    signal.signal(signal.SIGUSR1, lambda number, frame: unhurried.set())
    signal.signal(signal.SIGUSR2, lambda number, frame: unhurried.clear())
    main()
