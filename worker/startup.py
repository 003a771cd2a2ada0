"""Start-up of a worker: model, KV region, connector, engine.

Order, each step owned by ``Parts`` afterwards and ended by ``worker.host``:

1. The other ranks start, if there are any (see ``rank_group``); all do what ``rank_setup`` says.
2. The connector, which allocates and registers the KV region once the weights are loaded; a self-transfer.
3. The connectors of the other ranks, once they are ready. From then on the end of a rank ends this process.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

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
from twinpool.kv_transfer.connectors.base import ConnectorError, Endpoint
from twinpool.kv_transfer.layout import KVLayout
from twinpool.kv_transfer.links import RankEndpoint
from twinpool.proto import worker_pb2
from twinpool.rpc import PROTOCOL_VERSION
from twinpool.worker.cores import cores_for
from twinpool.worker.kv_hello import KVIdentity, RankRegion
from twinpool.worker.rank_group import RankGroup
from twinpool.worker.rank_launcher import LocalLauncher, RankLauncher
from twinpool.worker.rank_setup import (
    choose_device,
    kv_memory_bytes,
    make_rank_connector,
    prepare_process,
    self_transfer,
    tuned_for,
)
from twinpool.worker.ray_launcher import RayLauncher

log = logging.getLogger(__name__)

LOADING_LOG_S = 5.0

Role = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Parts:
    """What a role builds its worker from."""

    role: Role
    worker_id: str
    epoch: int
    model_name: str
    revision: str
    eos_ids: frozenset[int]
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    layout: KVLayout
    ranks: tuple[RankEndpoint, ...]
    group: RankGroup
    executor: ModelExecutor
    grammars: LLGuidanceGrammars
    identity: KVIdentity
    cores: frozenset[int]
    """Of the engine thread; see ``worker.cores``."""

    def close(self) -> None:
        """Ends the other ranks, then our own connector. The threads that use them must have ended."""
        self.group.close()
        for item in self.ranks:
            item.endpoint.close()
        self.executor.close()

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
            connector=self.identity.connector,
            vocab_size=self.vocab_size,
        )


def load_parts(
    config: Config, role: Role, pool: PoolSection, model_folder: Path, progress: Callable[[int, int], None]
) -> Parts:
    """Starts the ranks, loads the model and allocates the KV regions.

    Raises:
        ConfigError: the model, a device, the connector or a size does not work here; says why and what to do.
    """
    section = pool.engine
    prepare_process(section)
    launcher = make_launcher(config, role, pool)
    with contextlib.ExitStack() as undo:
        group = RankGroup(pool, launcher)
        undo.callback(group.close)
        try:
            place = launcher.locate(0, group.parallel.size)
            cores = cores_for(section, *place)
            device = choose_device(config.model.device, *place)
            connector = make_rank_connector(config, pool)
            undo.callback(connector.close)
            group.join(config, role, model_folder, device)
            built = build_executor(
                model_folder,
                dtype=config.model.dtype,
                device=device,
                block_size=section.block_size,
                num_blocks=section.num_blocks,
                kv_memory_bytes=kv_memory_bytes(section),
                allocate=connector.allocate,
                make_sampler=partial(Sampler, kernels=config.model.kernels),
                max_model_len=config.model.max_model_len,
                kernels=config.model.kernels,
                tuned_for=tuned_for(config.model, section),
                progress=progress,
                followers=group,
            )
            self_transfer(connector, built.shard.rank_layout)
            endpoints: list[Endpoint] = [connector, *group.endpoints(_rank_lost)]
        except (ConnectorError, UnsupportedModel, DoesNotFit) as error:
            raise ConfigError(str(error)) from error
        undo.pop_all()
    worker_id = pool.worker_id or f"{role}-{socket.gethostname()}-{pool.port or os.getpid()}"
    epoch = secrets.randbits(64)
    model = built.config
    ranks = tuple(RankEndpoint(rank, built.shard.layout_of(rank), endpoint) for rank, endpoint in enumerate(endpoints))
    regions = tuple(RankRegion(item.rank, item.layout, built.num_blocks, item.endpoint.metadata()) for item in ranks)
    return Parts(
        role=role,
        worker_id=worker_id,
        epoch=epoch,
        model_name=config.model.name or model_folder.name,
        revision=model.revision,
        eos_ids=model.eos_ids,
        vocab_size=model.vocab_size,
        max_model_len=built.max_model_len,
        max_num_seqs=section.max_num_seqs,
        layout=built.layout,
        ranks=ranks,
        group=group,
        executor=built.executor,
        grammars=LLGuidanceGrammars(model_folder / "tokenizer.json", model.vocab_size, model.eos_ids),
        identity=KVIdentity(worker_id, epoch, model.revision, built.layout, connector.name, regions),
        cores=cores,
    )


def make_launcher(config: Config, role: Role, pool: PoolSection) -> RankLauncher:
    """How the other ranks start. A worker without any needs no Ray. Raises ConfigError if that cannot work."""
    if pool.launcher == "local" or pool.tp_size * pool.pp_size == 1:
        return LocalLauncher()
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(f"{role}.launcher is ray, which is not installed; pip install 'twinpool[worker,ray]'")
    use_gpu = config.model.device == "cuda" or (config.model.device == "auto" and torch.cuda.is_available())
    return RayLauncher(config, role, pool, use_gpu)


def _rank_lost(rank: int) -> None:
    """The other ranks hold the rest of every request's KV, and may hang in a collective: the process ends at once."""
    log.critical("rank %d of this worker ended, the worker ends", rank)
    logging.shutdown()
    os._exit(1)


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
    """A progress callback (bytes done, total) that logs every few seconds, and the end with the rate."""
    began = last = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done == total or now - last >= LOADING_LOG_S:
            last = now
            rate = done / max(now - began, 1e-6) / 1e9
            log.info("weights: %d of %d MB, %.2f GB/s", done >> 20, total >> 20, rate)

    return progress
