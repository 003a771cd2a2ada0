"""Start-up of a worker: model, KV region, connector, engine.

Order, each step owned by ``Parts`` afterwards and ended by ``worker.host``:

1. Threads: as many for computation as configured, and a short switch interval, so that asyncio beside a busy engine
   thread keeps its pace (a step of 600 operators otherwise waits 5 ms for the interpreter at each of them).
2. The connector, which allocates and registers the KV region; the model's weights.
3. A self-transfer: a real read of our own region through a link to ourselves. Without it a worker is not ready.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from twinpool.config import Config, EngineSection, PoolSection
from twinpool.engine.core import Engine, EngineConfig
from twinpool.engine.errors import DoesNotFit, UnsupportedModel
from twinpool.engine.executor import ModelExecutor, build_executor
from twinpool.engine.grammar import LLGuidanceGrammars
from twinpool.engine.ngram import NgramProposer
from twinpool.engine.ports import KVExports, KVImports, OutputSink, RolePolicy, Speculation
from twinpool.engine.sampler import Sampler
from twinpool.engine.speculation import AdaptiveProposer, SpeculationController
from twinpool.errors import ConfigError
from twinpool.kv_transfer.connectors.base import Connector, ConnectorError, CopyRange, ReadState
from twinpool.kv_transfer.connectors.choose import make_connector
from twinpool.kv_transfer.connectors.ucx import UcxSettings
from twinpool.kv_transfer.layout import KVLayout, RankLayout
from twinpool.kv_transfer.transfer_thread import PUMP_INTERVAL_S
from twinpool.proto import worker_pb2
from twinpool.rpc import PROTOCOL_VERSION
from twinpool.worker.kv_hello import KVIdentity, RankRegion

log = logging.getLogger(__name__)

SELF_TRANSFER_TIMEOUT_S = 10.0
SELF = "self"
"""What we are called as our own peer."""
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Parts:
    """What a role builds its worker from."""

    role: str
    worker_id: str
    epoch: int
    model_name: str
    revision: str
    eos_ids: frozenset[int]
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    layout: KVLayout
    rank_layout: RankLayout
    connector: Connector
    executor: ModelExecutor
    grammars: LLGuidanceGrammars
    identity: KVIdentity

    def info(self, max_model_len: int, kv_address: str) -> worker_pb2.WorkerInfo:
        """The self-description for routers; ``max_model_len`` is what the engine can hold."""
        return worker_pb2.WorkerInfo(
            worker_id=self.worker_id,
            epoch=self.epoch,
            protocol=PROTOCOL_VERSION,
            role=self.role,
            model=self.model_name,
            revision=self.revision,
            layout=self.layout.fingerprint,
            layout_text=self.layout.text,
            block_size=self.layout.block_size,
            num_blocks=self.executor.num_blocks - 1,
            max_model_len=max_model_len,
            max_num_seqs=self.max_num_seqs,
            kv_address=kv_address,
            connector=self.connector.name,
            vocab_size=self.vocab_size,
        )


def check_port(host: str, port: int, key: str) -> None:
    """Fails early, before weights are read, if ``host:port`` cannot be bound.

    Raises:
        ConfigError: names the address and the setting ``key``.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}: {error.strerror}; stop the program that uses it or set {key}"
            ) from error


def choose_device(name: str) -> torch.device:
    """The device that ``model.device`` names. Raises ConfigError if it is not there."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("model.device is cuda, but torch sees no CUDA device; install torch's CUDA build or use cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def load_parts(
    config: Config, role: str, pool: PoolSection, model_folder: Path, progress: Callable[[int, int], None]
) -> Parts:
    """Loads the model and allocates the KV region.

    Raises:
        ConfigError: the model, the device, the connector or a size does not work here; says why and what to do.
    """
    section = pool.engine
    if section.threads:
        torch.set_num_threads(section.threads)
    sys.setswitchinterval(0.0001)
    device = choose_device(config.model.device)
    ucx = UcxSettings.for_host(pool.host, config.transport.ucx_tls, config.transport.ucx_net_devices)
    try:
        connector = make_connector(config.transport.connector, ucx, pool.host)
    except ConnectorError as error:
        raise ConfigError(str(error)) from error
    try:
        built = build_executor(
            model_folder,
            dtype=config.model.dtype,
            device=device,
            block_size=section.block_size,
            num_blocks=section.num_blocks,
            kv_memory_bytes=kv_memory(section, device),
            allocate=connector.allocate,
            make_sampler=Sampler,
            max_model_len=config.model.max_model_len,
            progress=progress,
        )
        self_transfer(connector, built.rank_layout)
    except (ConnectorError, UnsupportedModel, DoesNotFit) as error:
        connector.close()
        raise ConfigError(str(error)) from error
    worker_id = pool.worker_id or f"{role}-{socket.gethostname()}-{pool.port or os.getpid()}"
    epoch = secrets.randbits(64)
    region = RankRegion(0, built.rank_layout, built.executor.num_blocks, connector.metadata())
    return Parts(
        role=role,
        worker_id=worker_id,
        epoch=epoch,
        model_name=config.model.name or model_folder.name,
        revision=built.config.revision,
        eos_ids=built.config.eos_ids,
        vocab_size=built.config.vocab_size,
        max_model_len=built.max_model_len,
        max_num_seqs=section.max_num_seqs,
        layout=built.layout,
        rank_layout=built.rank_layout,
        connector=connector,
        executor=built.executor,
        grammars=LLGuidanceGrammars(model_folder / "tokenizer.json", built.config.vocab_size, built.config.eos_ids),
        identity=KVIdentity(worker_id, epoch, built.config.revision, built.layout, connector.name, (region,)),
    )


def kv_memory(section: EngineSection, device: torch.device) -> int:
    """Bytes for KV: as configured, else 1 GiB on CPU and 85 % of what is free on a GPU."""
    if section.kv_memory_gib is not None:
        return int(section.kv_memory_gib * GIB)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(0.85 * free)
    return GIB


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
        read = link.read([CopyRange(0, 0, layout.block_bytes)])
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


def make_engine(
    parts: Parts,
    section: EngineSection,
    policy: RolePolicy,
    sink: OutputSink,
    exports: KVExports,
    imports: KVImports,
) -> Engine:
    """The engine of a worker; the owner runs it on its own thread."""
    config = EngineConfig(
        max_model_len=parts.max_model_len,
        vocab_size=parts.vocab_size,
        revision=parts.revision,
        eos_token_ids=parts.eos_ids,
        block_size=section.block_size,
        max_num_seqs=section.max_num_seqs,
        max_num_batched_tokens=max(section.max_num_batched_tokens, section.max_num_seqs),
        prefill_chunk=section.prefill_chunk,
        prefix_caching=section.prefix_caching,
    )
    speculation = make_speculation(section)
    return Engine(config, parts.executor, policy, sink, exports, imports, time.monotonic, speculation, parts.grammars)


def make_speculation(section: EngineSection) -> Speculation | None:
    """Drafts as configured, while they pay; None without speculation."""
    if section.speculation == "off":
        return None
    proposer = NgramProposer(section.ngram_min, section.ngram_max, section.num_drafts)
    return AdaptiveProposer(proposer, SpeculationController())


def loading_log() -> Callable[[int, int], None]:
    """A progress callback (bytes done, total) that logs the start, each tenth and the rate."""
    began = time.monotonic()
    last = -1

    def progress(done: int, total: int) -> None:
        nonlocal last
        tenth = 10 * done // max(total, 1)
        if tenth > last:
            last = tenth
            rate = done / max(time.monotonic() - began, 1e-6) / 1e9
            log.info("weights: %d of %d MB, %.2f GB/s", done >> 20, total >> 20, rate)

    return progress
