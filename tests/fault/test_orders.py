"""Operators' commands against running workers: nobody loses a stream, and the process stays."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any

from load import all_kinds, check_all_same, prompt, stream

from clusters import Cluster

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


async def twinpool(farm: Cluster, *words: str) -> Any:
    """Runs an operator's command; returns what it prints as JSON."""
    command = [sys.executable, "-P", "-m", "twinpool", *words, "--json", "-a", f"127.0.0.1:{farm.admin_port}"]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


async def test_a_worker_drains_hands_over_and_comes_back(farm: Cluster) -> None:
    async with farm.client() as client:
        wanted = await all_kinds(client, 30)
        long = {"max_tokens": 3000, **GREEDY}
        wanted_long = await client.generate(prompt(70, 100), **long)
        began = asyncio.Event()

        async def note() -> None:
            began.set()

        running = asyncio.create_task(stream(client, prompt(70, 100), after=5, then=note, **long))
        await asyncio.wait_for(began.wait(), 60)
        status = await farm.until(lambda status: any(w.running for w in status.workers if w.role == "decode"))
        busy = next(w.worker_id for w in status.workers if w.role == "decode" and w.running)
        told = await twinpool(farm, "drain", busy, "--hand-over", "0")
        assert told == {"worker": busy, "draining": True, "requests": 0}
        got = await running
        check_all_same([got], [wanted_long])
        assert (got.decode_worker != busy, got.usage.redispatches) == (True, 1)
        await twinpool(farm, "drain", "prefill-0")
        elsewhere = await all_kinds(client, 30)
        check_all_same(elsewhere, wanted)
        assert not {busy, "prefill-0"} & {name for a in elsewhere for name in (a.prefill_worker, a.decode_worker)}
        for name in (busy, "prefill-0"):
            assert (await twinpool(farm, "drain", name, "--undo"))["draining"] is False
        status = await farm.all_free()
        assert not any(worker.draining or worker.state != "alive" for worker in status.workers)
        again = await all_kinds(client, 30)
        check_all_same(again, wanted)
        assert busy in {answer.decode_worker for answer in again}


async def test_a_flushed_cache_is_empty_and_log_levels_change(farm: Cluster) -> None:
    async with farm.client() as client:
        for _ in range(2):
            warm = await client.generate(prompt(71, 200), max_tokens=2, **GREEDY)
        assert warm.usage.decode_cached_tokens + warm.usage.prefill_cached_tokens > 0
        names = ["decode-0", "decode-1", "prefill-0", "prefill-1"]
        assert (await twinpool(farm, "flush-cache"))["names"] == names
        cold = await client.generate(prompt(71, 200), max_tokens=2, **GREEDY)
        assert (cold.usage.decode_cached_tokens, cold.usage.prefill_cached_tokens) == (0, 0)
        assert cold.token_ids == warm.token_ids
    assert (await twinpool(farm, "log-level", "error", "decode-0"))["names"] == ["decode-0"]
    before = farm.log("decode-0"), farm.log("decode-1")
    await twinpool(farm, "flush-cache")
    assert farm.log("decode-0") == before[0]
    assert farm.log("decode-1") != before[1]
    assert (await twinpool(farm, "log-level", "info"))["names"] == ["router", *names]
