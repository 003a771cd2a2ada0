"""Workers that must not exchange KV are refused before any payload, and the status says why, with both values."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from load import prompt

from twinpool.results import Status


async def test_unequal_workers_and_slow_links_are_refused_by_name(
    tiny_llama: Path, make_tiny_llama: Any, tmp_path: Path, start_cluster: Any, pace: dict[str, object]
) -> None:
    """decode-1 equals prefill-0, but wants a faster transport than there is; decode-0 equals nobody."""
    other = make_tiny_llama(tmp_path / "other", seed=1)
    settings = {**pace, "model.dtype": "float32", "model.name": "tiny", "router.disaggregate": "auto"}
    overrides: dict[str, dict[str, object]] = {
        "prefill-0": {"prefill.engine.block_size": 8},
        "prefill-1": {"model.dtype": "bfloat16"},
        "prefill-2": {"model.path": str(other)},
        "decode-1": {"decode.engine.block_size": 8, "transport.require": "rdma"},
    }
    async with start_cluster(tiny_llama, 3, 2, settings=settings, overrides=overrides) as cluster:

        def told(status: Status) -> bool:
            links = errors(status)
            return len(links) == 6 and all(error and error != "connecting" for error in links.values())

        found = errors(await cluster.until(told, 30.0))
        for decode, prefill, *said in (
            ("decode-0", "prefill-0", "layout", "block_size=8", "block_size=16"),
            ("decode-0", "prefill-1", "layout", "dtype=bfloat16", "dtype=float32"),
            ("decode-0", "prefill-2", "revision"),
            ("decode-1", "prefill-0", "transport.require", "'rdma'", "nixl/"),
        ):
            assert not [word for word in said if word not in found[decode, prefill]], found
        revisions = re.findall(r"has (\w+)", found["decode-0", "prefill-2"])
        assert len(set(revisions)) == 2
        command = [sys.executable, "-P", "-m", "twinpool", "status", "--address", cluster.address]
        printed = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
        for error in found.values():
            assert error in printed.stdout
        # Nobody is linked, and the mode allows it: decode computes the prompt itself, and says so.
        async with cluster.client() as client:
            answer = await client.generate(prompt(1, 100), max_tokens=3, ignore_eos=True)
            assert answer.usage.decode_computed_tokens == 100
            assert "no linked prefill worker" in answer.usage.route_reason


def errors(status: Status) -> dict[tuple[str, str], str]:
    """What is said of each link, by (decode worker, prefill worker)."""
    return {(w.worker_id, link.prefill_worker): link.error for w in status.workers for link in w.links}
