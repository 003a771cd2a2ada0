"""Ranks on the nodes of a Ray cluster, from rank 0's side. Ray itself runs in a process of its own (``ray_placer``).

1. The constructor listens for the ranks (``rank_dial``) and starts the placer.
2. ``start`` hands out channels that connect when the rank dials; ``locate`` waits until all ranks have their room.
3. A rank that ends before it dialled ends its channels, with the cause; afterwards its channels themselves tell.
4. When all ranks have been ended (``RankHandle.end``) the placer is told to go. It also goes when this process dies.

After the start nothing here needs Ray: if it is gone, ranks and rank 0 do not notice.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import Literal

from twinpool.config import Config, PoolSection
from twinpool.engine.channel import Channel, ChannelClosed, SocketChannel
from twinpool.errors import ConfigError
from twinpool.worker.rank_dial import RankDials
from twinpool.worker.ray_environment import driver_environment, own_environment
from twinpool.worker.ray_messages import FROM_PLACER, Ended, Failed, Place, Placed, Stop

log = logging.getLogger(__name__)

KILL_S = 5.0
"""How long Ray may take to kill a rank."""
_ANY_ADDRESS = ("0.0.0.0", "::", "[::]")


class RayLauncher:
    """Implements ``rank_launcher.RankLauncher``; see the module. For two ranks or more."""

    def __init__(self, config: Config, role: Literal["prefill", "decode"], pool: PoolSection, use_gpu: bool) -> None:
        """Starts the placer; returns at once.

        Raises:
            ConfigError: the pool's address cannot serve.
        """
        named = pool.advertise or pool.host
        if named in _ANY_ADDRESS:
            raise ConfigError(f"ranks on other nodes cannot dial {pool.host}; set {role}.advertise to an address of it")
        ranks = range(1, pool.tp_size * pool.pp_size)
        try:
            self.group_host = str(socket.getaddrinfo(named, 0, type=socket.SOCK_STREAM)[0][4][0])  # Ray takes no names
            self._dials = RankDials(self.group_host, ranks)
        except OSError as error:
            raise ConfigError(f"cannot listen for ranks on {named}: {error}; set {role}.advertise") from error
        self._use_gpu = use_gpu
        self._placed: Placed | None = None
        self._failure: str | None = None
        self._settled = threading.Event()
        self._ended = {rank: threading.Event() for rank in ranks}
        self._how: dict[int, str] = {}
        self._done: set[int] = set()
        ours, theirs = socket.socketpair()
        self._channel = SocketChannel(ours)
        environment = (
            own_environment(config, self.group_host)
            if config.ray.address is None
            else driver_environment(config.ray.address.rpartition(":")[0])
        )
        argv = [sys.executable, "-P", "-m", "twinpool.worker.ray_placer", str(theirs.fileno())]
        self._placer = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={**os.environ, **environment, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # signals of a terminal are for rank 0, which drains first
        )
        theirs.close()
        place = Place(
            config=config,
            role=role,
            use_gpu=use_gpu,
            host=self.group_host,
            port=self._dials.port,
            tokens={rank: self._dials.tokens(rank) for rank in ranks},
        )
        self._channel.send(place.encode())
        threading.Thread(target=self._receive, name="placer", daemon=True).start()

    def start(self, rank: int) -> RayRank:
        """See ``RankLauncher``."""
        return RayRank(*self._dials.channels(rank), rank, self)

    def locate(self, rank: int, size: int) -> tuple[int, int]:
        """See ``RankLauncher``. Ray shows each actor its own GPU alone, as if its rank were the only one there.

        Raises:
            ConfigError: the ranks cannot be placed.
        """
        self._settled.wait()
        if self._placed is None:
            raise ConfigError(self._failure or "the placer ended")
        if rank or not self._use_gpu or self._placed.gpus is None:
            return 0, 1
        index = _device_index(self._placed.gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
        return index, index + 1

    def end(self, rank: int, grace_s: float) -> str:
        """For ``RayRank.end``."""
        if not self._ended[rank].wait(grace_s):
            self._stop(rank)
            self._ended[rank].wait(KILL_S)
        self._done.add(rank)
        if len(self._done) == len(self._ended):
            self._dials.close()
            self._channel.close()
            self._placer.wait()
        return self._how.get(rank, "nobody knows how")

    def _stop(self, rank: int) -> None:
        try:
            self._channel.send(Stop(rank=rank).encode())
        except ChannelClosed:
            log.warning("rank %d still runs and Ray is gone; it ends by itself once this process has ended", rank)

    def _receive(self) -> None:
        try:
            while True:
                message = FROM_PLACER.validate_json(self._channel.receive())
                match message:
                    case Placed():
                        self._placed = message
                        self._settled.set()
                    case Failed():
                        self._give_up(message.message)
                    case Ended():
                        self._note_end(message.rank, message.how)
        except ChannelClosed:
            self._give_up("Ray, or the process that talks to it, ended; its last words are above")

    def _give_up(self, why: str) -> None:
        self._failure = self._failure or why
        self._settled.set()
        for rank in self._ended:
            self._note_end(rank, why)

    def _note_end(self, rank: int, how: str) -> None:
        self._how.setdefault(rank, how)
        self._dials.give_up(rank, how)
        self._ended[rank].set()


@dataclass(frozen=True, slots=True)
class RayRank:
    """Implements ``rank_launcher.RankHandle``."""

    step: Channel
    transfer: Channel
    rank: int
    launcher: RayLauncher

    def end(self, grace_s: float) -> str:
        """See ``RankHandle``."""
        return self.launcher.end(self.rank, grace_s)


def _device_index(gpu: str, visible: str | None) -> int:
    """The number under which torch knows ``gpu`` in this process, which sees ``visible`` (CUDA_VISIBLE_DEVICES).

    Raises:
        ConfigError: this process does not see it.
    """
    if visible is None:
        return int(gpu)
    names = [name.strip() for name in visible.split(",")]
    if gpu not in names:
        raise ConfigError(f"Ray gave GPU {gpu} to rank 0, whose CUDA_VISIBLE_DEVICES is {visible}; show it that GPU")
    return names.index(gpu)
