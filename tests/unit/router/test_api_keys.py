"""API keys: who gets in over gRPC and HTTP, what stays open, and keys that change while the router runs."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from twinpool.config import AuthSection
from twinpool.errors import ConfigError, Unauthenticated
from twinpool.proto import inference_pb2 as pb
from twinpool.router.api_keys import ApiKeys
from twinpool.router.caller import ANYBODY, Caller


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def test_without_keys_everybody_may_call() -> None:
    assert ApiKeys(AuthSection()).caller("") is ANYBODY


def test_keys_from_the_configuration() -> None:
    keys = ApiKeys(AuthSection(keys=(f"a:{digest('one')}", f"b:{digest('two')}:weight=2:max_in_flight=3")))
    assert keys.caller("Bearer one") == Caller("a")
    assert keys.caller("bearer two") == Caller("b", weight=2, max_in_flight=3)
    for wrong in ("", "one", "Bearer", "Bearer three", "Basic one", f"Bearer {digest('one')}", "Bearer \udcff"):
        with pytest.raises(Unauthenticated, match="API key is missing or unknown"):
            keys.caller(wrong)


def test_a_changed_file_is_used_and_a_broken_one_is_not(tmp_path: Path) -> None:
    now = [0.0]
    path = tmp_path / "keys.yaml"
    path.write_text(f"a: {{sha256: {digest('one')}}}\n")
    keys = ApiKeys(AuthSection(keys_file=str(path)), lambda: now[0])

    def change(text: str) -> None:
        path.write_text(text)
        os.utime(path, ns=(int(now[0] * 1e9), int(now[0] * 1e9)))
        now[0] += 2

    change(f"a: {{sha256: {digest('new')}, tokens_per_minute: 10, best_priority: -2}}\n")
    assert keys.caller("Bearer new") == Caller("a", tokens_per_minute=10, best_priority=-2)
    with pytest.raises(Unauthenticated):
        keys.caller("Bearer one")
    change("a: [")
    assert keys.caller("Bearer new").name == "a"
    change("")  # nobody left: closed, not open
    with pytest.raises(Unauthenticated):
        keys.caller("Bearer new")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: {sha256: short}", "a.sha256"),
        ("a: {key: plain}", "sha256"),
        (f"a: {{sha256: {digest('x')}, wieght: 2}}", "wieght"),
        (f"a: {{sha256: {digest('x')}}}\nb: {{sha256: {digest('x')}}}", "same sha256"),
        ("- a", "dictionary"),
        ("a: [", "cannot be read"),
    ],
)
def test_bad_files_are_refused_at_start(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        ApiKeys(AuthSection(keys_file=str(path)))
    assert digest("x") not in caught.value.message


async def test_the_public_surface_asks_for_a_key(make_cluster: Any) -> None:
    sections = {"auth": {"keys": [f"a:{digest('one')}:max_in_flight=1"]}}
    good = (("authorization", "Bearer one"),)
    async with (
        make_cluster("hello", sections=sections) as cluster,
        httpx.AsyncClient(base_url=cluster.http_url) as http,
    ):
        await cluster.router.wait_ready()
        request = pb.GenerateRequest(text="x", priority=-7)
        for metadata in ((), (("authorization", "Bearer two"),)):
            for call in (
                cluster.stub.Generate(request, metadata=metadata).read(),
                cluster.info.GetStatus(pb.GetStatusRequest(), metadata=metadata),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert [part.text async for part in cluster.stub.Generate(request, metadata=good)]
        assert cluster.workers[0].submits[-1].priority == 0  # the best that this key may have
        assert (await cluster.info.GetStatus(pb.GetStatusRequest(), metadata=good)).ready

        body = {"prompt": "x"}
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            answer = await http.post(path, json=body)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
            assert answer.json()["error"]["code"] == "unauthenticated"
        assert (await http.get("/v1/models")).status_code == 401
        header = {"authorization": "Bearer one"}
        assert (await http.post("/v1/completions", json=body, headers=header)).status_code == 200
        two = await http.post("/v1/completions", json={"prompt": ["x", "y"]}, headers=header)
        assert (two.status_code, int(two.headers["retry-after"]) >= 1) == (429, True)
        for path in ("/health", "/ready", "/version", "/metrics"):
            assert (await http.get(path)).status_code == 200
        await cluster.idle()
