"""The other ranks of a worker, from rank 0's side.

1. They start at once (and import torch while rank 0 prepares); ``join`` meets them in the process group.
2. ``agree`` (called by the executor's builder) waits for their weights and tells them how many blocks to allocate.
3. ``endpoints`` waits until all are ready, and gives their connectors; from now on the end of any of them, but by
   ``close``, calls ``on_lost``.
4. ``close`` closes their step channels, which ends them, and kills what is left after a grace. Idempotent.

With one rank there is nothing to start, and all of this is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import torch

from twinpool.config import Config, PoolSection
from twinpool.engine.channel import Channel, ChannelClosed
from twinpool.engine.parallel import ParallelContext
from twinpool.engine.process_group import join, serve_store
from twinpool.errors import ConfigError
from twinpool.worker.rank_launcher import RankHandle, RankLauncher
from twinpool.worker.rank_messages import FROM_RANK, Allocate, Allocated, Failed, Loaded, Start, Up
from twinpool.worker.remote_connector import RemoteConnector

END_GRACE_S = 10.0

MessageT = TypeVar("MessageT", Up, Loaded, Allocated)


class RankGroup:
    """Implements ``engine.executor.Followers``; see the module."""

    def __init__(self, pool: PoolSection, launcher: RankLauncher) -> None:
        """Starts ranks 1 and up."""
        self.parallel = ParallelContext(tp_size=pool.tp_size, pp_size=pool.pp_size)
        self._launcher = launcher
        self._handles: list[RankHandle] = [launcher.start(rank) for rank in range(1, self.parallel.size)]
        self._endpoints: list[RemoteConnector] = []

    def join(
        self, config: Config, role: Literal["prefill", "decode"], model_folder: Path, device: torch.device
    ) -> None:
        """Tells the ranks who they are, and connects rank 0's ``parallel`` with them.

        Raises:
            ConfigError: a rank ended.
        """
        if not self._handles:
            return
        group_host = self._launcher.group_host
        store, port = serve_store(group_host)
        for rank, handle in enumerate(self._handles, 1):
            self._expect(rank, Up)
            local_rank, num_local = self._launcher.locate(rank, self.parallel.size)
            start = Start(
                config=config,
                role=role,
                rank=rank,
                local_rank=local_rank,
                num_local=num_local,
                model_folder=str(model_folder),
                group_host=group_host,
                group_port=port,
            )
            handle.step.send(start.encode())
        try:
            self.parallel = join(self.parallel, store, group_host, device)
        except RuntimeError as error:
            raise ConfigError(f"the ranks of this worker cannot meet at {group_host}:{port}: {error}") from error

    @property
    def channels(self) -> Sequence[Channel]:
        """See ``Followers``."""
        return [handle.step for handle in self._handles]

    def agree(self, num_blocks: int) -> int:
        """See ``Followers``. Raises ConfigError if a rank cannot start."""
        for rank in range(1, len(self._handles) + 1):
            num_blocks = min(num_blocks, self._expect(rank, Loaded).num_blocks)
        for handle in self._handles:
            handle.step.send(Allocate(num_blocks=num_blocks).encode())
        return num_blocks

    def endpoints(self, on_lost: Callable[[int], None]) -> list[RemoteConnector]:
        """The ranks' connectors, by rank from 1; ``on_lost`` takes a rank, on another thread.

        Raises:
            ConfigError: a rank cannot start.
        """
        ready = [self._expect(rank, Allocated) for rank in range(1, len(self._handles) + 1)]
        self._endpoints = [
            RemoteConnector(rank, handle.transfer, message.connector, message.pumped, message.metadata, on_lost)
            for rank, (handle, message) in enumerate(zip(self._handles, ready, strict=True), 1)
        ]
        return self._endpoints

    def close(self) -> None:
        """See the module."""
        for endpoint in self._endpoints:
            endpoint.expect_end()
        for handle in self._handles:
            handle.step.close()
        if not self._endpoints:  # they have not finished starting, and may wait for each other
            for handle in self._handles:
                handle.transfer.close()
        for handle in self._handles:
            handle.end(END_GRACE_S)
        for endpoint in self._endpoints:
            endpoint.close()

    def _expect(self, rank: int, kind: type[MessageT]) -> MessageT:
        handle = self._handles[rank - 1]
        try:
            message = FROM_RANK.validate_json(handle.step.receive())
        except ChannelClosed as error:
            raise ConfigError(f"rank {rank} ended while it started: {handle.end(END_GRACE_S)}") from error
        if isinstance(message, Failed):
            raise ConfigError(f"rank {rank}: {message.message}")
        if not isinstance(message, kind):
            raise ConfigError(f"rank {rank} said {message.kind} where {kind.__name__} was due; run equal versions")
        return message
