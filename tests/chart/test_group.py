"""A worker over two pods: the leader starts a Ray head, the follower joins it by name, TP 2 on CPU; see ``pods``."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from chart import NAMESPACE, objects, template
from clusters import free_ports
from pods import Namespace
from tiny_models import write_tiny_llama
from twinpool import Client


@pytest.fixture
def folder() -> Iterator[Path]:
    """With a short path, as Ray's sockets need it."""
    with tempfile.TemporaryDirectory(prefix="tp-") as name:
        yield Path(name)


@pytest.fixture
def namespace(folder: Path) -> Iterator[Namespace]:
    engine = {"kv_memory_gib": 0.02}
    values = {
        "accelerator": "cpu",
        "auth": {"existingSecret": "token"},
        "model": {"source": "pvc", "pvc": {"claimName": "models", "path": "tiny"}},
        "router": {"preStopSeconds": 0},
        "prefill": {"replicas": 0},
        "decode": {"nodesPerReplica": 2, "scaling": "external"},
        "config": {
            "model": {"kernels": "reference"},
            "decode": {"engine": engine, "tp_size": 2, "drain_timeout_s": 240},
        },
        # On a loopback address other than 127.0.0.1 Ray listens on all: the usual port may be another test's.
        "ray": {"headPort": free_ports(1)[0]},
    }
    file = folder / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    write_tiny_llama(folder / "claim" / "tiny", max_position_embeddings=4096)
    secrets = {"token": {"token": "of-this-test"}}
    running = Namespace(folder, NAMESPACE, objects(template(4, file)), {"models": folder / "claim"}, secrets)
    try:
        yield running
    finally:
        running.close()


def test_leader_and_follower_serve_and_drain_together(namespace: Namespace) -> None:
    with ThreadPoolExecutor() as pool:
        starting = [pool.submit(namespace.start, "twinpool-decode", ordinal) for ordinal in (0, 1)]
        starting.append(pool.submit(namespace.start, "twinpool-router"))
        leader, follower, router = (start.result() for start in starting)
    namespace.ready(leader, follower, router)
    assert "joined the Ray head" in follower.log("decode")
    namespace.run("twinpool-test")
    with Client(f"{router.address}:8100") as client:
        # Of the four leaders that the router looks for, one is there; the follower is none.
        assert [worker.worker_id for worker in client.status().workers] == ["twinpool-decode-0"]
        with client.stream([5, 6, 7], max_tokens=100, temperature=0.0, ignore_eos=True, timeout=240.0) as stream:
            chunks = iter(stream)
            next(chunks)
            # Scaling down by a group ends both pods at once: the follower stays until the leader has drained.
            with ThreadPoolExecutor() as pool:
                ending = [pool.submit(namespace.delete, pod) for pod in (follower, leader)]
                for _ in chunks:
                    pass
                ends = [end.result() for end in ending]
    assert stream.result.usage.completion_tokens == 100
    assert stream.result.usage.redispatches == 0
    assert [code for code, _ in ends] == [0, 0], follower.log("decode") + leader.log("decode")
