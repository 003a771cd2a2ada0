"""The process group of one pair, with the thread that waits for it.

1. ``PairGroup`` starts its thread, which builds the group: a collective act, so it ends only when the peer does the
   same, or at the store's timeout. The group is outside torch's default group; rank 0 is the source, 1 the reader.
2. Operations ``post``ed before or after are started in order, several under way at once; ``done`` of each is called, in
   order, when it has ended. Neither torch's gloo work nor NCCL's can be awaited without blocking, hence the thread. It
   blocks, it never polls: an idle pair costs nothing (gloo's own loop wakes 100 times a second: 0.1 % of a core).
3. A peer that dies, or ``close``, ends the group; what was under way is dropped. ``failed`` is told a reason, unless
   closed. ``close`` returns at once: buffers belong to the operations, which live as long as the group may touch them.

Gloo has no abort. But an operation that times out closes all connections of its group, so ``close`` lets one do that.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from twinpool.kv_transfer.connectors.base import ConnectorError
from twinpool.kv_transfer.connectors.pair_messages import Transport
from twinpool.kv_transfer.connectors.pair_store import PairStore
from twinpool.kv_transfer.connectors.staging import new_stream, record_event

SOURCE_RANK, READER_RANK = 0, 1
MAX_UNDER_WAY = 4
_DATA_TAG, _ABORT_TAG = 0, 1
_FOREVER = timedelta(days=1)
"""Operations have no time limit of their own: exchanges do."""
_ABORT_AFTER = timedelta(milliseconds=1)
_ERRORS = (RuntimeError, ValueError, ConnectorError)
"""What torch, and our store through it, raise."""


@dataclass(frozen=True, slots=True)
class Operation:
    """``start`` (on the pair's thread) gives the buffer to send, or to receive into; ``done`` is called at its end."""

    start: Callable[[], torch.Tensor]
    done: Callable[[], None]


def gloo_device(host: str) -> Any:
    """Gloo's listener and event loop, bound to ``host`` alone; shared by all pairs of a connector.

    Raises:
        ConnectorError: ``host`` is no address of this machine.
    """
    try:
        return torch.distributed.ProcessGroupGloo.create_device(hostname=host)
    except RuntimeError as error:
        raise ConnectorError(f"gloo cannot listen on {host} ({error}); set the pool's host to an address") from error


def tame_nccl() -> None:
    """Keeps NCCL's watchdogs from ending the process when a peer dies: we abort the pair. Before the first group."""
    for name in ("ASYNC_ERROR_HANDLING", "ENABLE_MONITORING", "DUMP_ON_TIMEOUT", "PROPAGATE_ERROR"):
        os.environ.setdefault(f"TORCH_NCCL_{name}", "0")


class PairGroup:
    """See the module. ``reads`` tells the side: a reader receives, a source sends."""

    def __init__(
        self,
        transport: Transport,
        reads: bool,
        store: PairStore,
        listener: Any,
        device: torch.device,
        timeout_s: float,
        failed: Callable[[str], None],
    ) -> None:
        """``device`` is where NCCL's buffers are; ``timeout_s`` bounds building the group."""
        self._transport = transport
        self._reads = reads
        self._store = store
        self._listener = listener
        self._device = device
        self._timeout = timedelta(seconds=timeout_s)
        self._failed = failed
        self._operations: queue.SimpleQueue[Operation | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._group: Any = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"{transport}-pair", daemon=True)
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
            group, self._group = self._group, None
        self._store.close()
        self._operations.put(None)
        if group is not None:
            threading.Thread(target=self._abort, args=(group,), name="pair-abort", daemon=True).start()

    def join(self, timeout_s: float) -> None:
        """Waits for the thread of a closed group."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            with self._stream():
                group = self._build()
                with self._lock:
                    if self._closed:
                        return
                    self._group = group
                self._serve(group)
        except Exception as error:  # noqa: BLE001 - top of a thread: whatever it is, the pair has failed
            with self._lock:
                closed = self._closed
            if not closed:
                self._failed(str(error))
        finally:
            self._group = None

    def _build(self) -> Any:
        rank = READER_RANK if self._reads else SOURCE_RANK
        if self._transport == "gloo":
            # The public name for its options is their base class.
            gloo: Any = torch.distributed.ProcessGroupGloo
            options = gloo._Options()
            options._devices, options._threads, options._timeout = [self._listener], 1, self._timeout
            return gloo(self._store, rank, 2, options)
        # NCCL builds its communicator in the first operation and cannot be interrupted there: first see the peer alive.
        self._store.set(f"here/{rank}", b"1")
        self._store.wait([f"here/{1 - rank}"])
        options = torch.distributed.ProcessGroupNCCL.Options()
        options._timeout = _FOREVER
        return torch.distributed.ProcessGroupNCCL(self._store, rank, 2, options)

    def _serve(self, group: Any) -> None:
        under_way: deque[tuple[Any, torch.Tensor, Operation]] = deque()
        while True:
            if under_way and (self._operations.empty() or len(under_way) == MAX_UNDER_WAY):
                work, _, oldest = under_way.popleft()
                self._await(work)
                oldest.done()
                continue
            operation = self._operations.get()
            if operation is None:
                return
            buffer = operation.start()
            if self._reads:
                work = group.recv([buffer], SOURCE_RANK, _DATA_TAG)
            else:
                work = group.send([buffer], READER_RANK, _DATA_TAG)
            under_way.append((work, buffer, operation))

    def _await(self, work: Any) -> None:
        if self._transport == "gloo":
            work.wait(_FOREVER)
            return
        work.wait()
        record_event(blocking=True).synchronize()

    def _stream(self) -> contextlib.AbstractContextManager[object]:
        """NCCL orders its work behind the thread's current stream: one of its own, never the engine's."""
        if self._transport == "gloo":
            return contextlib.nullcontext()
        torch.cuda.set_device(self._device)
        return torch.cuda.stream(new_stream(self._device))

    def _abort(self, group: Any) -> None:
        # What it raises is what it is for.
        with contextlib.suppress(*_ERRORS):
            if self._transport == "nccl":
                group.abort()
            else:
                rank = SOURCE_RANK if self._reads else READER_RANK
                group.recv([torch.empty(1, dtype=torch.uint8)], rank, _ABORT_TAG).wait(_ABORT_AFTER)
