"""The rendered objects run: commands, ports, probes, configuration and names, as local processes (see ``pods``)."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import yaml

from chart import NAMESPACE, objects, template
from pods import Namespace, Pod
from tiny_models import write_tiny_llama
from twinpool import Client
from twinpool.prompt import Options, to_request
from twinpool.proto import inference_pb2_grpc

VALUES = {
    "accelerator": "cpu",
    "auth": {"existingSecret": "token"},
    "model": {"source": "pvc", "pvc": {"claimName": "models", "path": "tiny"}},
    "router": {"preStopSeconds": 1},
    "prefill": {"scaling": "external"},
    "decode": {"scaling": "external"},
    "config": {
        "router": {"drain_timeout_s": 240, "discovery_interval_s": 0.2, "route_hints": True},
        "prefill": {"engine": {"kv_memory_gib": 0.02}, "drain_timeout_s": 10},
        "decode": {"engine": {"kv_memory_gib": 0.02, "speculation": "off"}, "drain_timeout_s": 240},
        "session": {"dead_after_s": 10},
    },
}
PROMPT = list(range(10, 210))
GREEDY: Options = {"temperature": 0.0, "ignore_eos": True, "timeout": 240.0}


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(file): (file.stat().st_mtime_ns, file.stat().st_size) for file in sorted(folder.rglob("*"))}


@pytest.fixture(scope="module")
def claim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A claim with a model that nobody may write; afterwards nothing has changed."""
    folder = tmp_path_factory.mktemp("claim")
    write_tiny_llama(folder / "tiny", max_position_embeddings=4096)
    for file in [*folder.rglob("*"), folder]:
        file.chmod(0o555 if file.is_dir() else 0o444)
    before = contents(folder)
    yield folder
    assert contents(folder) == before


@pytest.fixture(scope="module")
def namespace(tmp_path_factory: pytest.TempPathFactory, claim: Path) -> Iterator[Namespace]:
    folder = tmp_path_factory.mktemp("boot")
    file = folder / "values.yaml"
    file.write_text(yaml.safe_dump(VALUES))
    tokens = {"token": {"token": secrets.token_hex(16)}}
    running = Namespace(folder, NAMESPACE, objects(template(4, file)), {"models": claim}, tokens)
    try:
        with ThreadPoolExecutor() as pool:
            running.ready(*pool.map(running.start, ["twinpool-decode", "twinpool-prefill", "twinpool-router"]))
        yield running
        assert not [pod.failed_probes for pod in running.pods.values() if pod.failed_probes]
    finally:
        running.close()


@pytest.fixture
def client(namespace: Namespace) -> Iterator[Client]:
    namespace.ready(namespace.pods["twinpool-router-0"])
    (address,) = namespace.addresses("twinpool-router")
    with Client(f"{address}:8100") as opened:
        yield opened


def test_helm_test_generates_a_token(namespace: Namespace) -> None:
    printed = namespace.run("twinpool-test")
    answer = json.loads(printed[printed.index("{") :])
    assert answer["usage"]["completion_tokens"] == 1


def read_remotely(client: Client) -> int:
    """Waits until a decode worker is linked to a prefill worker; returns the tokens that it reads for a prompt."""
    deadline = time.monotonic() + 30
    while not any(link.linked for worker in client.status().workers for link in worker.links):
        assert time.monotonic() < deadline, client.status()
        time.sleep(0.1)
    # Which route is cheaper depends on the machine's load: this one is asked for.
    request = to_request(PROMPT, {"max_tokens": 2, "cache_salt": secrets.token_hex(8), **GREEDY})
    with grpc.insecure_channel(client.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        *_, last = stub.Generate(request, metadata=(("x-twinpool-route", "remote"),), timeout=240)
    return int(last.usage.remote_tokens)


def test_both_pools_serve_a_prompt(namespace: Namespace, client: Client) -> None:
    assert read_remotely(client) == len(PROMPT)


def test_prefill_goes_to_zero_and_back_without_a_failed_request(namespace: Namespace, client: Client) -> None:
    wanted = client.generate(PROMPT, max_tokens=16, **GREEDY).token_ids
    stop = threading.Event()
    rounds = 0

    def ask() -> None:
        nonlocal rounds
        while not stop.is_set():
            # The salt keeps the prefix cache out: each round is a prompt that nobody has computed.
            answer = client.generate(PROMPT, max_tokens=16, **GREEDY, cache_salt=str(rounds))
            assert answer.token_ids == wanted
            rounds += 1

    with ThreadPoolExecutor() as pool:
        asking = pool.submit(ask)
        try:
            code, _ = namespace.delete(namespace.pods["twinpool-prefill-0"])
            assert code == 0
            alone = client.generate(PROMPT, max_tokens=4, **GREEDY)
            assert alone.prefill_worker == ""
            namespace.ready(namespace.start("twinpool-prefill", 1))
            assert read_remotely(client) == len(PROMPT)
        finally:
            stop.set()
        asking.result()
    assert rounds > 2


def end_under_a_stream(namespace: Namespace, client: Client, pod: Pod) -> None:
    """Deletes a pod while a stream runs on it: the stream is whole, the exit code 0, the grace is kept."""
    with client.stream(PROMPT, max_tokens=1500, **GREEDY) as stream:
        chunks = iter(stream)
        next(chunks)
        with ThreadPoolExecutor() as pool:
            ending = pool.submit(namespace.delete, pod)
            for _ in chunks:
                pass
            code, seconds = ending.result()
    assert stream.result.usage.completion_tokens == 1500
    assert stream.result.usage.redispatches == 0, "the drain was cut short"
    assert code == 0, pod.log(next(iter(pod.processes)))
    assert seconds < pod.template["spec"]["terminationGracePeriodSeconds"]


def test_a_decode_worker_drains_while_a_new_one_serves(namespace: Namespace, client: Client) -> None:
    old = namespace.pods["twinpool-decode-0"]
    # Prefill waits for a decode worker of its own kind only during an upgrade: here it starts at once.
    end_under_a_stream(namespace, client, old)
    namespace.ready(namespace.start("twinpool-decode", 1))


def test_the_router_drains_with_a_stream_running(namespace: Namespace, client: Client) -> None:
    end_under_a_stream(namespace, client, namespace.pods["twinpool-router-0"])
