"""Processes that have nothing to do cost nearly nothing: no spinning thread, no busy polling."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

IDLE_S = 4.0
SHARE_OF_A_CORE = 0.03


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def test_idle_cluster_uses_less_than_three_percent_of_a_core(tiny_llama: Path, start_cluster: Any) -> None:
    async with start_cluster(tiny_llama) as cluster:
        async with cluster.client() as client:
            await client.generate([1, 2, 3], max_tokens=4, ignore_eos=True)
        await cluster.all_free()
        pids = {name: node.process.pid for name, node in cluster.nodes.items()}
        began = time.monotonic()
        before = {name: cpu_seconds(pid) for name, pid in pids.items()}
        await asyncio.sleep(IDLE_S)
        elapsed = time.monotonic() - began
        used = {name: (cpu_seconds(pid) - before[name]) / elapsed for name, pid in pids.items()}
        # CPU time, not wall time: a busy machine does not add to it.
        assert max(used.values()) < SHARE_OF_A_CORE, used
