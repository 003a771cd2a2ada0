"""The process of a rank that something else than rank 0 placed, and the small process that stands between the two.

1. An agent (``ray_rank``) starts this module, writes a ``Placement`` to its standard input and keeps that open.
2. It forks. The parent, the keeper, stays the agent's child: it ends as the rank ends, and kills the rank when it gets
   SIGTERM. The child leaves for a session of its own, dials rank 0 and serves the rank.
3. The rank lives by its channels: whatever happens to agent, keeper or placer, it ends with rank 0. Ray kills the
   children of its workers when it comes to an end itself, hence the fork.
4. If standard input ends although the agent's own parent, the raylet, lives on, the agent was ended on purpose, to
   free what it had reserved: then the rank ends. If the raylet is gone too, only Ray is, which a rank does not need.

Until after the fork nothing is imported that starts threads.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import threading
from dataclasses import asdict, dataclass

RAYLET_END_S = 5.0
"""A raylet that dies has ended so long after its workers at the latest."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Which rank it is, and where rank 0 listens (see ``rank_dial``)."""

    rank: int
    host: str
    port: int
    tokens: str

    def encode(self) -> str:
        """One line."""
        return json.dumps(asdict(self))


def main() -> None:
    """Entry point: a pidfd of the raylet is the argument. Does not return."""
    placement = Placement(**json.loads(_read_line(sys.stdin.fileno())))
    rank = os.fork()
    if rank:
        os._exit(_keep(rank))
    os.setsid()
    threading.Thread(target=_follow_agent, args=(int(sys.argv[1]),), name="agent-watch", daemon=True).start()
    from twinpool.worker.rank_dial import dial
    from twinpool.worker.rank_process import run_rank

    try:
        step, transfer, own = dial(placement.host, placement.port, placement.rank, placement.tokens)
    except OSError as error:
        where = f"{placement.host}:{placement.port}"
        print(f"rank {placement.rank} cannot dial rank 0 at {where}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    run_rank(step, transfer, own)


def _keep(rank: int) -> int:
    """Waits for the rank; returns its exit code, as a shell gives it."""

    def kill(*_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, kill)
    os.close(sys.stdin.fileno())
    code = os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])
    return code if code >= 0 else 128 - code


def _follow_agent(raylet: int) -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    poll = select.poll()
    poll.register(raylet, select.POLLIN)
    if not poll.poll(RAYLET_END_S * 1000):
        os._exit(1)


def _read_line(descriptor: int) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        data = os.read(descriptor, 1)
        if not data:
            sys.exit("the agent ended before it said which rank this is")
        line += data
    return line


if __name__ == "__main__":
    main()
