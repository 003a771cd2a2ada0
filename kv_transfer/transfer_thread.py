"""The thread that owns a worker's connector, hold table pump and import table.

1. ``start`` runs it; from then on everything that touches the connector runs on it.
2. Other threads ``post`` callables; they run in order, and the thread wakes at once.
3. After each batch of callables, and when its deadline comes, the thread calls ``tick(now)``. It returns the
   (monotonic) time at which it wants to be called again, or None when nothing is open: then the thread blocks, and
   costs nothing. While something is open, ticks ask for the next one within milliseconds.
4. An exception in a callable or a tick goes to ``on_error`` and the thread goes on; its owner decides what dies.
5. ``stop`` runs what was posted before, then ends the thread. The owner closes the connector after that.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

PUMP_INTERVAL_S = 0.0005
"""How long a source may go without progress while somebody reads from it, and a reader without a poll."""

Tick = Callable[[float], float | None]
"""Does what is due at ``now``; returns when to be called again (same clock), None for never."""

MAX_WAIT_S = 3600.0
"""Much longer waits overflow what the system takes."""


class TransferThread:
    """Runs posted callables and a tick; see the module's life cycle."""

    def __init__(
        self,
        name: str,
        tick: Tick,
        on_error: Callable[[Exception], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tick = tick
        self._on_error = on_error
        self._clock = clock
        self._condition = threading.Condition()
        self._posted: deque[Callable[[], None]] = deque()
        self._woken = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread. Called once."""
        self._thread.start()

    def post(self, action: Callable[[], None]) -> None:
        """Runs ``action`` on the thread, soon; any thread, never blocks. Ignored once the thread has stopped."""
        with self._condition:
            self._posted.append(action)
            self._condition.notify()

    def wake(self) -> None:
        """Asks for a tick now; any thread."""
        with self._condition:
            self._woken = True
            self._condition.notify()

    def stop(self, timeout_s: float = 10.0) -> bool:
        """Runs what was posted so far and ends the thread; idempotent. False if it still runs after ``timeout_s``."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        due: float | None = None
        while True:
            with self._condition:
                while not (self._posted or self._woken or self._stopping):
                    if due is None:
                        self._condition.wait()
                        continue
                    left = due - self._clock()
                    if left <= 0:
                        break
                    self._condition.wait(min(left, MAX_WAIT_S))
                actions = list(self._posted)
                self._posted.clear()
                self._woken = False
                stopping = self._stopping
            for action in actions:
                self._guard(action)
            if stopping:
                with self._condition:
                    if not self._posted:
                        return
                continue
            try:
                due = self._tick(self._clock())
            except Exception as error:  # noqa: BLE001 - top of a thread: the owner decides what dies
                due = self._clock() + 0.1
                self._on_error(error)

    def _guard(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - top of a thread: the owner decides what dies
            self._on_error(error)
