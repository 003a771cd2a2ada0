"""The two process groups that a pair can be: gloo over TCP, NCCL between GPUs. Rank 0 is the source, 1 the reader.

Both are outside torch's default group. Transfers complete in the order in which they were started.

Gloo wakes a waiting receive when the peer dies only if none of its bytes have arrived yet, a send never. So nobody
waits for data: behind each buffer the source sends an empty message, for which the reader waits, and the reader answers
with an empty message, for which the source waits. Their arrival proves the rest. Nor has gloo an abort, but an
operation that times out closes the connections of its group.

NCCL's kernels may wait for a dead peer for ever, where no network card tells of its death: ``abort`` ends them.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed

from twinpool.kv_transfer.connectors.base import ConnectorError
from twinpool.kv_transfer.connectors.pair_store import PairStore
from twinpool.kv_transfer.connectors.staging import new_stream, record_event

SOURCE_RANK, READER_RANK = 0, 1
_DATA_TAG, _ANSWER_TAG, _ABORT_TAG = 0, 1, 2
_FOREVER = timedelta(days=1)
"""Operations have no time limit of their own: exchanges do."""
_ABORT_AFTER = timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True)
class Transfer:
    """A started transfer; ``sign`` is what to wait for. Buffers live as long as this."""

    data: Any
    sign: Any
    rest: Any = None


class PairBackend(Protocol):
    """A built process group. Everything but ``abort`` is called on the pair's thread."""

    def start(self, buffer: torch.Tensor) -> Transfer:
        """Starts sending ``buffer``, or receiving into it. RuntimeError if the group is broken."""

    def finish(self, transfer: Transfer) -> None:
        """Blocks until the oldest transfer has ended. RuntimeError if the group broke."""

    def abort(self) -> None:
        """Breaks the group, and with it every wait; any thread; may take some milliseconds."""


def gloo_listener(host: str) -> Any:
    """Gloo's listener and event loop, bound to ``host`` alone; shared by all pairs of a connector.

    Raises:
        ConnectorError: ``host`` is no address of this machine.
    """
    try:
        return torch.distributed.ProcessGroupGloo.create_device(hostname=host)
    except RuntimeError as error:
        raise ConnectorError(f"gloo cannot listen on {host} ({error}); set the pool's host to an address") from error


class GlooBackend:
    """See the module; buffers are in host memory."""

    def __init__(self, reads: bool, store: PairStore, listener: Any, timeout_s: float) -> None:
        """Connects, both ends at the same time. Raises RuntimeError or ConnectorError after ``timeout_s``."""
        # The public name for its options is their base class.
        gloo: Any = torch.distributed.ProcessGroupGloo
        options = gloo._Options()
        options._devices, options._threads, options._timeout = [listener], 1, timedelta(seconds=timeout_s)
        self._reads = reads
        self._peer = SOURCE_RANK if reads else READER_RANK
        self._group: Any = gloo(store, READER_RANK if reads else SOURCE_RANK, 2, options)
        self._answer: Any = None

    def start(self, buffer: torch.Tensor) -> Transfer:
        """See ``PairBackend``."""
        if self._reads:
            data = self._group.recv([buffer], self._peer, _DATA_TAG)
            return Transfer(data, self._group.recv([_nothing()], self._peer, _DATA_TAG))
        data = self._group.send([buffer], self._peer, _DATA_TAG)
        tail = self._group.send([_nothing()], self._peer, _DATA_TAG)
        return Transfer(data, self._group.recv([_nothing()], self._peer, _ANSWER_TAG), tail)

    def finish(self, transfer: Transfer) -> None:
        """See ``PairBackend``."""
        transfer.sign.wait(_FOREVER)
        transfer.data.wait(_FOREVER)
        if not self._reads:
            transfer.rest.wait(_FOREVER)
            return
        if self._answer is not None:
            self._answer.wait(_FOREVER)
        self._answer = self._group.send([_nothing()], self._peer, _ANSWER_TAG)

    def abort(self) -> None:
        """See ``PairBackend``."""
        # What it raises is what it is for.
        with contextlib.suppress(RuntimeError):
            self._group.recv([_nothing()], self._peer, _ABORT_TAG).wait(_ABORT_AFTER)


def tame_nccl() -> None:
    """Keeps NCCL's watchdogs from ending the process when a peer dies: we abort the pair. Before the first group."""
    for name in ("ASYNC_ERROR_HANDLING", "ENABLE_MONITORING", "DUMP_ON_TIMEOUT", "PROPAGATE_ERROR"):
        os.environ.setdefault(f"TORCH_NCCL_{name}", "0")


class NcclBackend:
    """See the module; buffers are on ``device``."""

    def __init__(self, reads: bool, store: PairStore, device: torch.device) -> None:
        """Raises ConnectorError if the peer does not come in the store's time."""
        rank = READER_RANK if reads else SOURCE_RANK
        # NCCL builds its communicator in the first operation and cannot be interrupted there: first see the peer alive.
        store.set(f"here/{rank}", b"1")
        store.wait([f"here/{1 - rank}"])
        self._reads = reads
        torch.cuda.set_device(device)
        # NCCL orders its work behind the current stream: one of its own, never the engine's.
        self._stream = new_stream(device)
        options = torch.distributed.ProcessGroupNCCL.Options()
        options._timeout = _FOREVER
        self._group: Any = torch.distributed.ProcessGroupNCCL(store, rank, 2, options)

    def start(self, buffer: torch.Tensor) -> Transfer:
        """See ``PairBackend``."""
        with torch.cuda.stream(self._stream):
            if self._reads:
                work = self._group.recv([buffer], SOURCE_RANK, _DATA_TAG)
            else:
                work = self._group.send([buffer], READER_RANK, _DATA_TAG)
        return Transfer(buffer, work)

    def finish(self, transfer: Transfer) -> None:
        """See ``PairBackend``."""
        with torch.cuda.stream(self._stream):
            transfer.sign.wait()
            record_event(blocking=True).synchronize()

    def abort(self) -> None:
        """See ``PairBackend``."""
        with contextlib.suppress(RuntimeError):
            self._group.abort()


def _nothing() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)
