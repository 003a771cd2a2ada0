"""``twinpool up`` and ``twinpool scale``: pools grow and shrink under load, and no request notices."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from processes import alive, children

from background_load import background_load
from deployments import twinpool, up
from twinpool import AsyncClient


@pytest.fixture
async def deployment(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[dict[str, Any], asyncio.subprocess.Process]]:
    """What ``twinpool up --json`` says, and its process; it has drawn a token of its own."""
    monkeypatch.setenv("TWINPOOL_CACHE", str(tmp_path / "cache"))
    # A cache of its own would have the kernels compiled again.
    async with up(tiny_llama, tmp_path, {"model.kernels": "reference"}) as started:
        yield started


async def test_both_pools_grow_and_shrink_under_load(deployment: Any, capsys: pytest.CaptureFixture[str]) -> None:
    addresses, launcher = deployment
    at = ("--address", addresses["controller"])
    before = children(launcher.pid)
    async with AsyncClient(addresses["grpc"]) as client, background_load(client) as load:
        steps = {}
        for pool, size in [("decode", 3), ("prefill", 2), ("decode", 1), ("prefill", 1)]:
            code, output, errors = await twinpool("scale", pool, str(size), *at, "--json")
            assert code == 0, errors
            steps[f"{pool} to {size}"] = json.loads(output)["steps"]
            await load.more(4)
            if pool == "decode" and size == 3:
                await load.served_by("decode-1", "decode-2")
        status = await client.status()
    with capsys.disabled():
        print(json.dumps(steps | {"requests": load.finished, "redispatches": load.redispatches}))
    actions = [(step["action"], step["replicas"]) for name in steps for step in steps[name]]
    assert [count for action, count in actions if action == "added"] == [2, 3, 2]
    assert {step["worker"] for step in steps["decode to 1"]} == {"decode-1", "decode-2"}
    assert [step["worker"] for step in steps["prefill to 1"]] == ["prefill-1"]
    assert {worker.worker_id for worker in status.workers} == {"prefill-0", "decode-0"}
    assert load.prefill_workers["prefill-1"]
    assert sorted(children(launcher.pid)) == sorted(before)


async def test_sizes_that_cannot_be_are_refused_and_a_failed_start_leaves_the_rest(
    deployment: Any, tiny_llama: Path
) -> None:
    addresses, launcher = deployment
    at = ("--address", addresses["controller"])
    before = children(launcher.pid)
    assert (await twinpool("scale", "decode", "0", *at))[0::2] == (1, f"error: {NEEDS_ONE.format('decode')}\n")
    assert (await twinpool("scale", "prefill", "0", *at))[0::2] == (1, f"error: {NEEDS_ONE.format('prefill')}\n")
    assert "the pools are prefill and decode" in (await twinpool("scale", "router", "2", *at))[2]
    assert (await twinpool("scale", "decode", "max", *at))[0] == 0

    config = tiny_llama / "config.json"
    hidden = config.rename(tiny_llama / "config.hidden")
    try:
        code, output, errors = await twinpool("scale", "decode", "9", *at, "--json")
    finally:
        hidden.rename(config)
    assert code == 1
    failed = json.loads(output)["steps"]
    assert {step["action"] for step in failed} == {"failed"}
    assert "config.json" in failed[0]["error"]
    code, output, errors = await twinpool("scale", "decode", "1", *at)
    assert code == 0, errors

    wrong = os.environ | {"TWINPOOL_SESSION__TOKEN": "wrong"}
    assert "bearer token" in (await twinpool("scale", "decode", "2", *at, environment=wrong))[2]
    assert sorted(children(launcher.pid)) == sorted(before)
    launcher.send_signal(signal.SIGTERM)
    async with asyncio.timeout(30):
        await launcher.wait()
    assert not any(map(alive, before))


NEEDS_ONE = "the {} pool needs 1 or more; `twinpool scale all 0` ends all workers"
