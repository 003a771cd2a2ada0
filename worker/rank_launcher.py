"""How the other ranks of a worker come to run: what differs between local processes and other ways to place them.

A launcher starts ``rank_process.serve_rank`` somewhere, with one end of two channels, and hands out the other ends. A
rank ends when told to, when it fails, or when its transfer channel ends; ``LocalLauncher`` adds nothing to that. One
that places ranks on other machines makes the channels from connections that the ranks dial, and authenticates these.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import Protocol

from twinpool.engine.channel import Channel, SocketChannel

LOOPBACK = "127.0.0.1"


class RankHandle(Protocol):
    """A started rank, from rank 0's side."""

    @property
    def step(self) -> Channel:
        """Carries start-up and steps."""

    @property
    def transfer(self) -> Channel:
        """Carries the rank's part of the exchange, and tells when either side is gone."""

    def end(self, grace_s: float) -> str:
        """Waits for the rank's end, at most ``grace_s``, then kills it; returns how it ended. Idempotent."""


class RankLauncher(Protocol):
    """A way to start ranks."""

    @property
    def group_host(self) -> str:
        """The address of rank 0 at which the ranks' process group meets."""

    def locate(self, rank: int, size: int) -> tuple[int, int]:
        """The number of rank ``rank`` of ``size`` among the worker's ranks on its machine, and how many it has."""

    def start(self, rank: int) -> RankHandle:
        """Starts rank ``rank``, above 0; returns at once."""


@dataclass(frozen=True, slots=True)
class LocalRank:
    """A rank in a child process. It notices our end by its channels, so nothing outlives this process."""

    step: Channel
    transfer: Channel
    process: subprocess.Popen[bytes]

    def end(self, grace_s: float) -> str:
        """See ``RankHandle``."""
        try:
            code = self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        return f"exit code {code}" if code >= 0 else f"signal {-code}"


class LocalLauncher:
    """Starts ranks as children of this process, on this machine; they print where it prints."""

    group_host = LOOPBACK

    def locate(self, rank: int, size: int) -> tuple[int, int]:
        """See ``RankLauncher``."""
        return rank, size

    def start(self, rank: int) -> LocalRank:
        """See ``RankLauncher``."""
        with contextlib.ExitStack() as stack:
            pairs = [socket.socketpair() for _ in range(2)]
            theirs = [stack.enter_context(pair[1]) for pair in pairs]
            descriptors = [end.fileno() for end in theirs]
            # -P keeps the working directory off the import path, as for the worker itself.
            argv = [sys.executable, "-P", "-m", "twinpool.worker.rank_process", *map(str, descriptors)]
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, pass_fds=descriptors, env={**os.environ, "PYTHONUNBUFFERED": "1"}
            )
        step, transfer = (SocketChannel(pair[0]) for pair in pairs)
        return LocalRank(step, transfer, process)
