"""`twinpool trace`: a delay in one stage of one request is found in that stage."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import slow_worker

from clusters import Cluster

GUILTY = {
    "prefill queue": ("prefill-0", signal.SIGUSR1),
    "prefill": ("prefill-0", signal.SIGUSR2),
    "transfer": ("decode-0", signal.SIGUSR1),
    "decode queue": ("decode-0", signal.SIGUSR2),
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Iterator[Cluster]:
    settings: dict[str, object] = {"transport.ucx_tls": "tcp,self", "transport.connector": "nixl"}
    cluster = Cluster.of(tmp_path_factory.mktemp("slow"), tiny_llama, settings=settings)
    cluster.entries |= {name: Path(slow_worker.__file__) for name in ("prefill-0", "decode-0")}
    with cluster.running():
        yield cluster


async def test_the_guilty_stage_is_named(cluster: Cluster) -> None:
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    async with cluster.client() as client:
        for number in range(8):
            await client.generate([number + 1] * 40, cache_salt=str(number), **options)
        for stage, (name, signum) in GUILTY.items():
            cluster.signal(name, signum)
            answer = await client.generate([7] * 40, cache_salt=stage, **options)
            trace = await client.trace(answer.request_id)
            assert trace.suspect == stage, trace
            guilty = next(item for item in trace.stages if item.name == stage)
            assert guilty.delay_s >= 0.25
            assert guilty.usual_s is not None
            assert guilty.usual_s < 0.25
            assert trace.total_s > trace.first_token_s > 0
            command = [sys.executable, "-P", "-m", "twinpool", "trace", answer.request_id, "-a", cluster.address]
            shown = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
            assert f"look at: {stage}" in shown.stdout
        printed = await asyncio.to_thread(subprocess.run, [*command, "--json"], capture_output=True, check=True)
        assert json.loads(printed.stdout)["suspect"] == stage
