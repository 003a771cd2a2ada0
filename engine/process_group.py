"""How the ranks of a worker exchange tensors: torch's process groups, NCCL between GPUs and gloo between CPUs.

1. Rank 0 serves a store (``serve_store``) on the one address it is given, the others dial it (``join_store``).
2. All ranks call ``join``, which returns when everybody is there: one group per TP stage, and two of all ranks
   for the pipeline. Nothing becomes torch's global default group.
3. The groups live as long as the context that ``join`` returned. A rank that dies makes the others' collectives fail
   (gloo) or hang (NCCL); whoever watches the ranks ends the process.

torch's store listens on every address unless it gets a socket, and it authenticates nobody: like the collectives
themselves it belongs on a network that only the cluster reaches.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch.distributed.distributed_c10d import Store

from twinpool.engine.parallel import ParallelContext

_backends: Any = torch.distributed
"""torch's stubs know neither all constructors nor the collectives of stores and backends."""

JOIN_TIMEOUT = timedelta(seconds=120)
"""How long a rank waits for the others at start-up, and for a peer within a step."""


class Group:
    """Implements ``Collective`` and ``Peers`` over one process group."""

    def __init__(self, group: Any, size: int, device: torch.device) -> None:
        self._group = group
        self._size = size
        self._device = device
        self._sends: deque[tuple[Any, torch.Tensor]] = deque()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sums in place."""
        x = x.contiguous()
        self._group.allreduce([x]).wait()
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """``[rows, n] -> [rows, size * n]``."""
        x = x.contiguous()
        rows, columns = x.shape
        parts = x.new_empty((self._size * rows, columns))
        self._group._allgather_base(parts, x).wait()
        return parts.view(self._size, rows, columns).transpose(0, 1).reshape(rows, self._size * columns)

    def send(self, x: torch.Tensor, rank: int) -> None:
        """See ``Peers``."""
        x = x.contiguous()
        self._sends.append((self._group.send([x], rank, 0), x))
        while self._sends and (len(self._sends) > self._size or self._sends[0][0].is_completed()):
            self._sends.popleft()[0].wait()

    def receive(self, shape: Sequence[int], dtype: torch.dtype, rank: int) -> torch.Tensor:
        """See ``Peers``."""
        x = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        self._group.recv([x], rank, 0).wait()
        return x


def serve_store(host: str) -> tuple[Store, int]:
    """A store that listens on ``host`` alone, and its port. It lives as long as the object."""
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.bind(address)
    listener.listen()
    port = listener.getsockname()[1]
    # The store closes the descriptor.
    store = _backends.TCPStore(
        host, port, None, True, JOIN_TIMEOUT, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def join_store(host: str, port: int) -> Store:
    """Another rank's store, which must be there already."""
    store: Store = _backends.TCPStore(host, port, None, False, JOIN_TIMEOUT, wait_for_workers=False)
    return store


def join(place: ParallelContext, store: Store, host: str, device: torch.device) -> ParallelContext:
    """``place`` with its connections. ``host`` is the address on which this rank's sockets listen.

    Raises RuntimeError if a rank does not come.
    """

    def group(name: str, rank: int, size: int) -> Group:
        return Group(_make(_backends.PrefixStore(name, store), rank, size, host, device), size, device)

    joined = place
    if place.tp_size > 1:
        joined = replace(joined, collective=group(f"tp{place.pp_rank}", place.tp_rank, place.tp_size))
    if place.pp_size > 1:
        joined = replace(
            joined, peers=group("pp", place.rank, place.size), results=group("results", place.rank, place.size)
        )
    return joined


def _make(store: Store, rank: int, size: int, host: str, device: torch.device) -> Any:
    if device.type == "cuda":
        options = _backends.ProcessGroupNCCL.Options()
        options._timeout = JOIN_TIMEOUT
        return _backends.ProcessGroupNCCL(store, rank, size, options)
    options = _backends.ProcessGroupGloo._Options()
    options._devices = [_backends.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = JOIN_TIMEOUT
    options._threads = 1
    return _backends.ProcessGroupGloo(store, rank, size, options)
