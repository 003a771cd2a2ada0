"""The process of a rank other than 0.

1. It says ``Up``, takes ``Start``, joins the process group, loads its shard; allocates what all ranks agreed on, reads
   from itself, and says ``Allocated`` (see ``rank_messages``). If it cannot, it says why and ends.
2. The main thread runs steps, the transfer thread serves rank 0's part of the exchange.
3. It ends in order when rank 0 closes the step channel (exit code 0), and at once when the transfer channel ends,
   because rank 0 is gone, or when anything fails (1). Signals of a
   terminal or a service manager go to the worker, which drains first: SIGINT and SIGTERM are ignored here.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

from twinpool.engine.channel import Channel, ChannelClosed, SocketChannel
from twinpool.engine.errors import DoesNotFit, UnsupportedModel
from twinpool.engine.parallel import ParallelContext
from twinpool.engine.process_group import join, join_store
from twinpool.engine.rank import Rank, follow
from twinpool.engine.shard import load_shard
from twinpool.errors import ConfigError
from twinpool.kv_transfer.connectors.base import ConnectorError
from twinpool.logs import setup_logging
from twinpool.worker.cores import cores_for, pin_thread
from twinpool.worker.rank_messages import Allocate, Allocated, Failed, Loaded, Start, Up
from twinpool.worker.rank_setup import (
    choose_device,
    kv_memory_bytes,
    make_rank_connector,
    prepare_process,
    self_transfer,
    tuned_for,
)
from twinpool.worker.rank_transfer import RankTransfer

log = logging.getLogger("twinpool.worker.rank_process")

CANNOT_START = (ConnectorError, UnsupportedModel, DoesNotFit, ConfigError)


def serve_rank(step: Channel, transfer: Channel, host: str | None = None) -> int:
    """Runs a rank until its end; returns the exit code.

    ``host`` is the address on which its sockets listen; None takes those of rank 0, which then is on this machine.
    """
    serving = RankTransfer(transfer, _orphaned, _failed)
    step.send(Up().encode())
    start = Start.model_validate_json(step.receive())
    setup_logging(start.config.logging)
    try:
        rank = _start(start, step, serving, host)
    except CANNOT_START as error:
        step.send(Failed(message=str(error)).encode())
        return 1
    except RuntimeError as error:  # torch and its collectives have no narrower type
        step.send(Failed(message=f"{type(error).__name__}: {error}").encode())
        return 1
    try:
        follow(rank, step)
    except ChannelClosed:
        serving.close()
    return 0


def _start(start: Start, step: Channel, serving: RankTransfer, host: str | None) -> Rank:
    config = start.config
    pool = config.prefill if start.role == "prefill" else config.decode
    if host is not None:
        pool = pool.model_copy(update={"host": host})
    section = pool.engine
    prepare_process(section)
    pin_thread(cores_for(section, start.local_rank, start.num_local))
    device = choose_device(config.model.device, start.local_rank, start.num_local)
    place = ParallelContext(tp_size=pool.tp_size, pp_size=pool.pp_size).at(start.rank)
    parallel = join(place, join_store(start.group_host, start.group_port), host or start.group_host, device)
    connector = make_rank_connector(config, pool)
    shard = load_shard(
        Path(start.model_folder),
        dtype=config.model.dtype,
        device=device,
        block_size=section.block_size,
        parallel=parallel,
        kernels=config.model.kernels,
        tuned_for=tuned_for(config.model, section),
    )
    fitting = shard.fitting_blocks(section.num_blocks, kv_memory_bytes(section))
    step.send(Loaded(num_blocks=fitting).encode())
    num_blocks = Allocate.model_validate_json(step.receive()).num_blocks
    rank = shard.rank(connector.allocate(num_blocks * shard.rank_layout.block_bytes, device))
    self_transfer(connector, shard.rank_layout)
    ready = Allocated(connector=connector.name, pumped=connector.pumped, metadata=connector.metadata())
    serving.serve(connector)
    step.send(ready.encode())
    return rank


def _orphaned() -> None:
    os._exit(1)


def _failed(error: Exception) -> None:
    log.critical("a rank's transfer thread failed, its worker ends", exc_info=error)
    logging.shutdown()
    os._exit(1)


def run_rank(step: Channel, transfer: Channel, host: str | None = None) -> NoReturn:
    """Makes this process a rank (see ``serve_rank``) and ends it with the rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    code = 1
    try:
        code = serve_rank(step, transfer, host)
    except Exception:
        log.critical("a rank failed, its worker ends", exc_info=True)
    finally:
        logging.shutdown()
        # Without teardown: a process group waits for ranks that may be gone.
        os._exit(code)


if __name__ == "__main__":
    # File descriptors of the step and the transfer channel are the arguments.
    ends = [SocketChannel(socket.socket(fileno=int(argument))) for argument in sys.argv[1:3]]
    run_rank(ends[0], ends[1])
