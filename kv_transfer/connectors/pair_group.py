"""The process group of one pair, with the thread that waits for it.

1. ``PairGroup`` starts its thread, which builds the group: a collective act, so it ends only when the peer does the
   same, or after a timeout.
2. Operations, ``post``ed before or after, are started in order, several under way at once; ``done`` of each is called,
   in order, when it has ended. Neither gloo's nor NCCL's can be awaited without blocking, hence the thread. It never
   polls: an idle pair costs nothing (gloo's own loop, one per process, wakes 100 times a second: 0.3 % of a core).
3. A peer that dies, or ``close``, ends the group; what was under way is dropped. ``failed`` is told a reason, unless
   closed. ``close`` returns at once: buffers belong to the operations, which live as long as the group may touch them.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from twinpool.kv_transfer.connectors.pair_backends import PairBackend, Transfer
from twinpool.kv_transfer.connectors.pair_store import PairStore

MAX_UNDER_WAY = 4


@dataclass(frozen=True, slots=True)
class Operation:
    """``start`` (on the pair's thread) gives the buffer to send, or to receive into; ``done`` is called at its end."""

    start: Callable[[], torch.Tensor]
    done: Callable[[], None]


class PairGroup:
    """See the module."""

    def __init__(self, build: Callable[[], PairBackend], store: PairStore, failed: Callable[[str], None]) -> None:
        """``build`` runs on the pair's thread, and waits in ``store``."""
        self._build = build
        self._store = store
        self._failed = failed
        self._operations: queue.SimpleQueue[Operation | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._backend: PairBackend | None = None
        self._closed = False
        self._aborting: threading.Thread | None = None
        self._thread = threading.Thread(target=self._run, name="kv-pair", daemon=True)
        self._thread.start()

    def post(self, operation: Operation) -> None:
        """Queues an operation; any thread, never blocks."""
        self._operations.put(operation)

    def close(self) -> None:
        """Ends everything; never blocks, idempotent. ``join`` waits for the thread."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            backend, self._backend = self._backend, None
        self._store.close()
        self._operations.put(None)
        if backend is not None:
            self._aborting = threading.Thread(target=backend.abort, name="kv-pair-abort", daemon=True)
            self._aborting.start()

    def join(self, timeout_s: float) -> None:
        """Waits for the threads of a closed group, each at most so long."""
        self._thread.join(timeout_s)
        if self._aborting is not None:
            self._aborting.join(timeout_s)

    def _run(self) -> None:
        try:
            backend = self._build()
            with self._lock:
                if self._closed:
                    return
                self._backend = backend
            self._serve(backend)
        except Exception as error:  # noqa: BLE001 - top of a thread: whatever it is, the pair has failed
            with self._lock:
                closed = self._closed
                self._backend = None
            if not closed:
                self._failed(str(error))

    def _serve(self, backend: PairBackend) -> None:
        under_way: deque[tuple[Transfer, Operation]] = deque()
        while True:
            if under_way and (self._operations.empty() or len(under_way) == MAX_UNDER_WAY):
                transfer, oldest = under_way.popleft()
                backend.finish(transfer)
                oldest.done()
                continue
            operation = self._operations.get()
            if operation is None:
                return
            under_way.append((backend.start(operation.start()), operation))
