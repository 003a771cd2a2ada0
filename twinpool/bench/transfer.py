"""Read bandwidth through the exchange against raw NIXL reads of the same blocks, per transport.

UCX takes its settings from the environment of a process, so each transport has a reader and a source of its own.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from twinpool.bench.figures import Machine
from twinpool.errors import ConfigError, TwinpoolError

TRANSPORTS = {"shared_memory": "", "tcp": "tcp"}
"""Name to UCX_TLS; without one UCX takes shared memory within a machine."""


def compare(blocks: str, rounds: int, note: Callable[[str], None]) -> dict[str, Any]:
    """Measures all transports one after another; returns what the JSON output says. ``blocks``: "16,256,2048"."""
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", blocks):
        raise ConfigError(f"--blocks {blocks}: write counts with commas between them, such as 16,256,2048")
    result: dict[str, Any] = {"machine": dataclasses.asdict(Machine.now()), "rounds": rounds}
    for name, tls in TRANSPORTS.items():
        note(f"{rounds} pairs of each size over {name}")
        command = [sys.executable, "-P", "-m", "twinpool.bench.transfer_reader", blocks, str(rounds), tls]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise TwinpoolError(f"the reader over {name} ended with {done.returncode}; what it said is above")
        result[name] = json.loads(done.stdout.splitlines()[-1])
    return result
