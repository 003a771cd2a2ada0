"""The OpenAI-compatible surface: shapes, streams, errors."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import pytest

from twinpool.errors import InvalidRequest
from twinpool.router.http_body import MAX_BODY_BYTES
from twinpool.router.openai_chat import ChatBody
from twinpool.router.openai_types import CompletionBody

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def events_of(body: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in body.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_chat(make_cluster: Any, eos: int) -> None:
    async with make_cluster("héllo 👋") as cluster, httpx.AsyncClient(base_url=cluster.http_url) as client:
        await cluster.router.wait_ready()
        answer = await client.post("/v1/chat/completions", json=CHAT | {"model": "tiny", "user": "me"})
        assert answer.status_code == 200
        body = answer.json()
        assert body["object"] == "chat.completion"
        assert body["model"] == "tiny"
        choice = body["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": "héllo 👋", "refusal": None}
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
        usage = body["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
        extra = body["twinpool"]
        assert extra["usage"]["remote_tokens"] == usage["prompt_tokens"]
        assert extra["usage"]["decode_computed_tokens"] == 0
        assert (extra["prefill_worker"], extra["decode_worker"]) == ("prefill-0", "decode-0")
        assert extra["timings"]["total_s"] > 0


@pytest.mark.parametrize("usage", [True, False])
async def test_chat_stream(make_cluster: Any, usage: bool) -> None:
    async with make_cluster("héllo 👋") as cluster, httpx.AsyncClient(base_url=cluster.http_url) as client:
        await cluster.router.wait_ready()
        body = CHAT | {"stream": True, "stream_options": {"include_usage": usage}}
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = events_of(answer.text)
        chunks = [event["choices"][0] for event in events if event["choices"]]
        assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == "héllo 👋"
        assert chunks[0]["delta"]["role"] == "assistant"
        assert chunks[0]["delta"]["content"]
        assert not any("role" in chunk["delta"] for chunk in chunks[1:])
        assert [chunk["finish_reason"] for chunk in chunks if chunk["finish_reason"]] == ["stop"]
        assert chunks[-1]["finish_reason"] == "stop"
        assert len({event["id"] for event in events}) == 1
        assert "twinpool" in events[-1]
        if usage:
            assert events[-1]["choices"] == []
            assert events[-1]["usage"]["completion_tokens"] == 12
        else:
            assert "usage" not in events[-1]


async def test_completion_prompts_in_all_forms(make_cluster: Any, byte_ids: Any) -> None:
    async with make_cluster("out") as cluster, httpx.AsyncClient(base_url=cluster.http_url) as client:
        await cluster.router.wait_ready()
        for prompt, expected in (
            ("ab", ["ab"]),
            (["ab", "cd"], ["ab", "cd"]),
            (byte_ids("ab"), ["ab"]),
            ([byte_ids("ab"), byte_ids("cd")], ["ab", "cd"]),
        ):
            answer = await client.post("/v1/completions", json={"prompt": prompt, "n": 2, "echo": True})
            body = answer.json()
            assert answer.status_code == 200, body
            assert [choice["index"] for choice in body["choices"]] == list(range(2 * len(expected)))
            texts = [choice["text"] for choice in body["choices"]]
            assert texts == [f"{given}out" for given in expected for _ in range(2)]
            assert body["usage"]["prompt_tokens"] == sum(map(len, expected))


async def test_completion_stream_of_two_prompts(make_cluster: Any) -> None:
    async with make_cluster("out") as cluster, httpx.AsyncClient(base_url=cluster.http_url) as client:
        await cluster.router.wait_ready()
        options = {"include_usage": True, "continuous_usage_stats": True}
        body = {"prompt": ["ab", "cd"], "stream": True, "echo": True, "stream_options": options}
        events = events_of((await client.post("/v1/completions", json=body)).text)
        texts = {0: "", 1: ""}
        for event in events[:-1]:
            texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
        assert texts == {0: "about", 1: "cdout"}
        counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
        assert counts == sorted(counts)
        assert events[-1]["usage"]["completion_tokens"] == 8 == counts[-1]


async def test_prompt_logprobs_as_evaluation_tools_ask(make_cluster: Any, byte_ids: Any) -> None:
    async with make_cluster("out") as cluster, httpx.AsyncClient(base_url=cluster.http_url) as client:
        await cluster.router.wait_ready()
        body = {"prompt": byte_ids("abc"), "echo": True, "max_tokens": 1, "logprobs": 1, "temperature": 0}
        choice = (await client.post("/v1/completions", json=body)).json()["choices"][0]
        assert choice["text"] == "abco"
        logprobs = choice["logprobs"]
        assert logprobs["tokens"] == ["a", "b", "c", "o"]
        assert logprobs["token_logprobs"] == [None, -1.0, -1.0, -0.5]
        assert logprobs["text_offset"] == [0, 1, 2, 3]
        assert logprobs["top_logprobs"][0] is None
        assert logprobs["top_logprobs"][3] == {"o": -0.5}
        only = (await client.post("/v1/completions", json=body | {"max_tokens": 0})).json()["choices"][0]
        assert only["text"] == "abc"
        assert only["logprobs"]["tokens"] == ["a", "b", "c"]


async def test_chat_logprobs(make_cluster: Any) -> None:
    async with make_cluster("hé") as cluster, httpx.AsyncClient(base_url=cluster.http_url) as client:
        await cluster.router.wait_ready()
        answer = await client.post("/v1/chat/completions", json=CHAT | {"logprobs": True, "top_logprobs": 1})
        entries = answer.json()["choices"][0]["logprobs"]["content"]
        assert [entry["bytes"] for entry in entries][:3] == [[104], [195], [169]]
        assert entries[0]["top_logprobs"] == [{"token": "h", "logprob": -0.5, "bytes": [104]}]


async def test_options_reach_the_workers(make_cluster: Any) -> None:
    async with make_cluster("ok") as cluster, httpx.AsyncClient(base_url=cluster.http_url) as client:
        await cluster.router.wait_ready()
        body = CHAT | {
            "temperature": 0.5,
            "top_k": 7,
            "min_p": 0.1,
            "seed": -1,
            "max_completion_tokens": 9,
            "min_tokens": 1,
            "stop": None,
            "ignore_eos": False,
            "repetition_penalty": 1.5,
            "logit_bias": {"5": 2},
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
        }
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        submit = cluster.workers[0].submits[0]
        assert (submit.sampling.temperature, submit.sampling.top_k, submit.sampling.seed) == (0.5, 7, 2**64 - 1)
        assert (submit.stopping.max_tokens, submit.stopping.min_tokens) == (9, 1)
        assert submit.sampling.logit_bias[5] == 2
        assert json.loads(submit.structured_output.json_schema) == {"type": "object"}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("chat/completions", {"messages": []}, 400, "messages"),
        ("chat/completions", {}, 400, "messages"),
        ("chat/completions", CHAT | {"temperature": -1}, 400, "temperature"),
        ("chat/completions", CHAT | {"temperature": "hot"}, 400, "temperature"),
        ("chat/completions", CHAT | {"tools": [{"type": "function"}]}, 400, "tools"),
        ("chat/completions", CHAT | {"no_such_field": 1}, 400, "no_such_field"),
        ("chat/completions", CHAT | {"model": "other"}, 404, None),
        ("chat/completions", CHAT | {"top_logprobs": 3}, 400, "top_logprobs"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages"),
        ("completions", {"prompt": []}, 400, "prompt"),
        ("completions", {"prompt": [-1]}, 400, "prompt"),
        ("completions", {"prompt": "x" * 600}, 400, "prompt"),
        ("completions", {"prompt": ["ok", ""]}, 400, "prompt"),
        ("completions", {"prompt": "x" * 50_000}, 400, "prompt"),
        ("completions", {"prompt": [1] * 50_000}, 400, "prompt"),
        ("completions", {"prompt": "x", "request_id": "a\nb"}, 400, "request_id"),
        ("completions", {"prompt": "x", "structured_outputs": {"json": "[" * 100_000}}, 400, "response_format"),
        ("chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2**40}, 400, "top_logprobs"),
        ("completions", {"prompt": "x", "suffix": "y"}, 400, "suffix"),
        ("completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
    ],
)
async def test_errors(make_cluster: Any, path: str, body: Any, status: int, param: str | None) -> None:
    async with make_cluster("ok") as cluster, httpx.AsyncClient(base_url=cluster.http_url) as client:
        await cluster.router.wait_ready()
        for stream in (False, True):
            answer = await client.post(f"/v1/{path}", json=body | {"stream": stream})
            assert answer.status_code == status, answer.text
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["type"] == "invalid_request_error"
            assert error["param"] == param
        assert cluster.router.admission.in_flight == 0
        assert not any(worker.submits for worker in cluster.workers)


@pytest.mark.parametrize("value", [2**40, 10**40, -1e300])
async def test_no_number_is_a_defect(make_cluster: Any, value: float) -> None:
    async with make_cluster("ok") as cluster, httpx.AsyncClient(base_url=cluster.http_url) as client:
        await cluster.router.wait_ready()
        for path, kind, prompt in (
            ("chat/completions", ChatBody, CHAT),
            ("completions", CompletionBody, {"prompt": "x"}),
        ):
            for name in kind.model_fields:
                for shape in (value, [value], {"5": value}, {str(value): 1}):
                    answer = await client.post(f"/v1/{path}", json={"logprobs": True} | prompt | {name: shape})
                    assert answer.status_code in (200, 400), (name, shape, answer.text)


async def test_a_body_that_is_too_large(make_cluster: Any) -> None:
    async with make_cluster("ok") as cluster, httpx.AsyncClient(base_url=cluster.http_url) as client:
        await cluster.router.wait_ready()
        for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
            answer = await client.post(path, content=b" " * (MAX_BODY_BYTES + 1))
            assert (answer.status_code, "MiB" in answer.json()["error"]["message"]) == (413, True)
        assert (await client.post("/tokenize", json={"prompt": "x" * 50_000})).status_code == 400
        assert (await client.post("/tokenize", json={"messages": CHAT["messages"] * 50_000})).status_code == 400


async def test_answers_do_not_wait_for_acknowledgements(make_cluster: Any) -> None:
    async with make_cluster("ok") as cluster, httpx.AsyncClient(base_url=cluster.http_url) as client:
        times = []
        for _ in range(20):
            begin = time.monotonic()
            assert (await client.post("/v1/completions", json={"prompt": 5})).status_code == 400
            times.append(time.monotonic() - begin)
        assert min(times[5:]) < 0.03  # a delayed acknowledgement takes 40 ms, on a connection that is not new


def test_too_many_prompts_are_refused_before_requests_are_made() -> None:
    with pytest.raises(InvalidRequest, match="2000 prompts"):
        CompletionBody(prompt=["a"] * 2000).to_requests("")


async def test_a_defect_has_openai_form(make_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with make_cluster("ok") as cluster, httpx.AsyncClient(base_url=cluster.http_url) as client:
        monkeypatch.setattr(cluster.router.intake, "open", None)
        answer = await client.post("/v1/completions", json={"prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "internal_error")


async def test_not_json_and_unknown_path(make_cluster: Any) -> None:
    async with make_cluster("ok") as cluster, httpx.AsyncClient(base_url=cluster.http_url) as client:
        answer = await client.post("/v1/completions", content=b"{nope")
        assert (answer.status_code, "error" in answer.json()) == (400, True)
        answer = await client.get("/v1/nowhere")
        assert (answer.status_code, "error" in answer.json()) == (404, True)


async def test_overload_has_retry_after(make_cluster: Any) -> None:
    async with make_cluster("ok", max_queued=1) as cluster, httpx.AsyncClient(base_url=cluster.http_url) as client:
        await cluster.router.wait_ready()
        answer = await client.post("/v1/completions", json={"prompt": ["a", "b"]})
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert cluster.router.admission.in_flight == 0
        assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200


async def test_failure_is_never_a_success_status(make_cluster: Any) -> None:
    async with make_cluster("ok", prefills=0) as cluster, httpx.AsyncClient(base_url=cluster.http_url) as client:
        await cluster.until(lambda: len(cluster.router.registry.views()) == 1)
        for stream in (False, True):
            answer = await client.post("/v1/chat/completions", json=CHAT | {"stream": stream})
            assert answer.status_code == 503


async def test_error_in_the_middle_of_a_stream(make_cluster: Any) -> None:
    def setup(cluster: Any) -> None:
        cluster.workers[1].pause_after = 2

    async with (
        make_cluster("hello", setup=setup, default_deadline_s=0.4) as cluster,
        httpx.AsyncClient(base_url=cluster.http_url) as client,
    ):
        await cluster.router.wait_ready()
        answer = await client.post("/v1/chat/completions", json=CHAT | {"stream": True})
        last = [line for line in answer.text.split("\n\n") if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"


@pytest.mark.parametrize("stream", [False, True])
async def test_disconnect_cancels(make_cluster: Any, stream: bool) -> None:
    def setup(cluster: Any) -> None:
        cluster.workers[1].pause_after = 2

    async with make_cluster("hello", setup=setup) as cluster:
        await cluster.router.wait_ready()
        client = httpx.AsyncClient(base_url=cluster.http_url)
        task = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT | {"stream": stream}))
        await cluster.workers[1].paused.wait()
        task.cancel()
        await client.aclose()
        await cluster.idle()
        await cluster.eventually(lambda: all(worker.cancels for worker in cluster.workers))


async def test_small_routes(make_cluster: Any, byte_ids: Any) -> None:
    async with make_cluster("ok") as cluster, httpx.AsyncClient(base_url=cluster.http_url) as client:
        assert (await client.get("/health")).status_code == 200
        await cluster.router.wait_ready()
        assert (await client.get("/ready")).status_code == 200
        assert (await client.get("/version")).json()["version"]
        models = (await client.get("/v1/models")).json()["data"]
        assert [(model["id"], model["max_model_len"]) for model in models] == [("tiny", 512)]
        assert (await client.get("/v1/models/tiny")).json() == models[0]
        unknown = await client.get("/v1/models/owner/other")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        tokens = (await client.post("/tokenize", json={"prompt": "abc"})).json()
        assert tokens["tokens"] == byte_ids("abc")
        assert (await client.post("/detokenize", json={"tokens": tokens["tokens"]})).json()["prompt"] == "abc"
        chat = (await client.post("/tokenize", json=CHAT)).json()
        assert chat["count"] > 5
        await client.post("/v1/completions", json={"prompt": "abc"})
        metrics = (await client.get("/metrics")).text
        assert 'twinpool_router_requests_total{outcome="ok"} 1.0' in metrics
        assert 'twinpool_router_tokens_total{kind="remote"} 3.0' in metrics
        assert 'twinpool_router_workers{role="decode",state="alive"} 1.0' in metrics


async def test_ready_says_what_is_missing(make_cluster: Any) -> None:
    async with make_cluster("ok", decodes=0) as cluster, httpx.AsyncClient(base_url=cluster.http_url) as client:
        answer = await client.get("/ready")
        assert answer.status_code == 503
        assert "decode" in answer.json()["error"]["message"]


async def test_what_stopped_an_answer(make_cluster: Any, byte_ids: Any) -> None:
    """As vLLM has it: nothing at the end of sequence, a stop string, or the id of a stop token as a number."""
    (o,) = byte_ids("o")
    async with make_cluster("hello") as cluster, httpx.AsyncClient(base_url=cluster.http_url) as client:
        await cluster.router.wait_ready()
        cases: list[tuple[Any, Any]] = [({}, None), ({"stop": "ell"}, "ell"), ({"stop_token_ids": [o]}, o)]
        for extra, wanted in cases:
            for path, body in (("chat/completions", CHAT), ("completions", {"prompt": "x"})):
                answer = await client.post(f"/v1/{path}", json=body | {"max_tokens": 20, **extra})
                (choice,) = answer.json()["choices"]
                assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", wanted)


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ({"role": "wizard", "content": "x"}, "messages[0].role: Input should be 'system', 'developer', 'user'"),
        ({"content": "x"}, "messages[0].role: Field required"),
        ({"role": "user"}, "messages[0]: a message of role user needs content"),
        ({"role": "system", "content": None}, "messages[0]: a message of role system needs content"),
        ({"role": "assistant"}, "messages[0]: a message of role assistant needs content"),
        ({"role": "tool", "tool_call_id": "c"}, "messages[0]: a message of role tool needs content"),
        ({"role": "user", "content": []}, "messages[0]: content has no parts"),
        (None, "messages is empty"),
    ],
)
async def test_conversations_that_say_nothing(make_cluster: Any, message: Any, told: str) -> None:
    async with make_cluster("hello") as cluster, httpx.AsyncClient(base_url=cluster.http_url) as client:
        await cluster.router.wait_ready()
        body = {"messages": [] if message is None else [message]}
        answer = await client.post("/v1/chat/completions", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", "messages")
        assert error["message"].startswith(told)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": ""},
        {"role": "assistant", "content": None, "reasoning_content": "hm"},
        {"role": "assistant", "tool_calls": [CALL]},
    ],
)
def test_turns_without_text_that_say_something(message: Any) -> None:
    assert ChatBody.model_validate({"messages": [message]}).messages[0].text == ""
