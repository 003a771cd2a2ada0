"""The Ray actor of a rank: it holds the rank's share of the placement group, and runs the rank as a process of its own.

1. ``start`` starts ``rank_keeper``, which forks the rank; ``wait`` returns when the rank has ended.
2. ``stop`` kills the rank. If the actor itself is ended, the rank follows, unless Ray ends as a whole.
"""

from __future__ import annotations

import os
import subprocess
import sys


class RankActor:
    """See the module; made into an actor by ``ray_placer``, with a thread for ``wait`` and one for ``stop``."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def gpus(self) -> str:
        """The GPUs that Ray gave to this actor, as in CUDA_VISIBLE_DEVICES."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def start(self, placement: str) -> None:
        """Starts the rank; ``placement`` is an encoded ``rank_keeper.Placement``."""
        raylet = os.pidfd_open(os.getppid())
        # -P keeps the working directory off the import path, as for the worker itself.
        argv = [sys.executable, "-P", "-m", "twinpool.worker.rank_keeper", str(raylet)]
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, pass_fds=[raylet], env={**os.environ, "PYTHONUNBUFFERED": "1"}
        )
        os.close(raylet)
        assert self._process.stdin is not None
        self._process.stdin.write(placement.encode() + b"\n")
        self._process.stdin.flush()  # and it stays open: see rank_keeper

    def wait(self) -> str:
        """Waits for the rank's end; returns how it ended."""
        assert self._process is not None
        code = self._process.wait()
        return f"exit code {code}" if code < 128 else f"signal {code - 128}"

    def stop(self) -> None:
        """Kills the rank, if it still runs."""
        if self._process is not None:
            self._process.terminate()
