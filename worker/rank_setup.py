"""What every rank of a worker does to start, rank 0 in the worker's process and the others in theirs.

1. ``prepare_process``: threads, and a short switch interval, so that a thread beside a busy one keeps its pace (a step
   of 600 operators otherwise waits 5 ms for the interpreter at each of them).
2. ``choose_device`` and ``make_rank_connector``; the connector allocates the KV region once sizes are agreed on.
3. ``self_transfer``: a real read of our own region through a link to ourselves. Without it a rank is not ready.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from twinpool.config import Config, EngineSection, ModelConfig, PoolSection
from twinpool.engine.memory import GIB
from twinpool.engine.shard import StepSizes
from twinpool.errors import ConfigError
from twinpool.kv_transfer.connectors.base import Connector, ConnectorError, ReadState
from twinpool.kv_transfer.connectors.choose import make_connector
from twinpool.kv_transfer.connectors.ucx import UcxSettings
from twinpool.kv_transfer.copy_table import CopyTable
from twinpool.kv_transfer.layout import RankLayout
from twinpool.kv_transfer.transfer_thread import PUMP_INTERVAL_S

SELF_TRANSFER_TIMEOUT_S = 10.0
SELF = "self"
"""What we are called as our own peer."""


def prepare_process(section: EngineSection) -> None:
    """Sets up threads of this process."""
    if section.threads:
        torch.set_num_threads(section.threads)
    sys.setswitchinterval(0.0001)


def choose_device(name: str, local_rank: int, num_local: int) -> torch.device:
    """The device of the ``local_rank``-th of ``num_local`` ranks on this machine, as ``model.device`` says.

    Raises:
        ConfigError: it is not there.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("model.device is cuda, but torch sees no CUDA device; install torch's CUDA build or use cpu")
    count = torch.cuda.device_count()
    if num_local > count:
        raise ConfigError(
            f"tp_size × pp_size needs {num_local} GPUs, but torch sees {count}; lower them, or show the process more "
            "(CUDA_VISIBLE_DEVICES)"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def make_rank_connector(config: Config, pool: PoolSection) -> Connector:
    """The connector of this rank. Raises ConnectorError if it cannot work here."""
    transport = config.transport
    ucx = UcxSettings.for_host(pool.host, transport.ucx_tls, transport.ucx_net_devices)
    return make_connector(transport.connector, ucx, pool.host)


def kv_memory_bytes(section: EngineSection) -> int | None:
    """Memory for KV of each rank as configured, or None."""
    return None if section.kv_memory_gib is None else int(section.kv_memory_gib * GIB)


def tuned_for(model: ModelConfig, section: EngineSection) -> StepSizes | None:
    """Steps on which attention is timed, or None where it keeps its defaults."""
    if model.kernel_tuning == "off":
        return None
    return StepSizes(section.max_num_seqs, section.prefill_chunk, model.max_model_len)


def self_transfer(connector: Connector, layout: RankLayout) -> None:
    """Reads our own null block through a link to ourselves; proves that the connector works on this machine.

    Raises:
        ConnectorError: it does not.
    """
    # Payloads between our two ends wait here, as they would in a session, for both belong to this thread.
    inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    connector.accept(SELF, lambda payload: inbox.put(partial(link.deliver, payload)))
    link = connector.connect(connector.metadata(), lambda payload: inbox.put(partial(connector.deliver, SELF, payload)))
    try:
        read = link.read(CopyTable.of([(0, 0, layout.block_bytes)]))
        deadline = time.monotonic() + SELF_TRANSFER_TIMEOUT_S
        while (state := link.poll(read)) is ReadState.PENDING:
            connector.progress()
            with contextlib.suppress(queue.Empty):
                inbox.get(timeout=PUMP_INTERVAL_S)()
            if time.monotonic() > deadline:
                break
        if state is not ReadState.DONE:
            raise ConnectorError(
                f"the {connector.name} connector could not read from this worker's own memory ({state.value}); "
                "check transport.ucx_tls and transport.ucx_net_devices, or use transport.connector local"
            )
    finally:
        link.close()
        connector.dismiss(SELF)
