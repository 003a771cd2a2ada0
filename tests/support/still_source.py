"""``twinpool`` with a source that stands still between SIGUSR1 and SIGUSR2; everything else in the process goes on.

Over TCP a read needs the source's progress: what decode workers read from this process meanwhile hangs for certain,
however fast the machine is, until SIGUSR2 or the process's end.
"""

from __future__ import annotations

import signal
import threading

from twinpool.cli.main import main
from twinpool.kv_transfer.connectors.nixl import NixlConnector

still = threading.Event()
progress = NixlConnector.progress


def gated(connector: NixlConnector) -> None:
    if not still.is_set():
        progress(connector)


if __name__ == "__main__":
    NixlConnector.progress = gated  # type: ignore[method-assign]
    signal.signal(signal.SIGUSR1, lambda signum, frame: still.set())
    signal.signal(signal.SIGUSR2, lambda signum, frame: still.clear())
    main()
