"""Every option of both APIs: it reaches the engine's request, is refused by name, or is documented to change nothing.

The tables below must cover every field of the request messages and bodies: a new field fails the tests until it is here
and in docs/parity.md.
"""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor

from twinpool.engine.request import Constraint, Request
from twinpool.errors import InvalidRequest, Unsupported
from twinpool.proto import inference_pb2 as pb
from twinpool.router.openai_chat import ChatBody
from twinpool.router.openai_types import CompletionBody, GenerationBody, parse
from twinpool.router.tool_format import ToolFormat
from twinpool.worker.translate import request_from_submit

ROOT = Path(__file__).parents[3]
PARITY = (ROOT / "docs" / "parity.md").read_text(encoding="utf-8")

SAMPLING: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.75,
    "top_k": 7,
    "min_p": 0.125,
    "seed": 2**64 - 5,
    "n": 3,
    "presence_penalty": 0.25,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.5,
    "logit_bias": {5: 2.0, 9: -100.0},
}
STOPPING: dict[str, Any] = {"max_tokens": 8, "min_tokens": 2, "stop_token_ids": [7, 8], "ignore_eos": True}
AT_THE_ROUTER = {"stop": ["never said"], "include_stop": True}
CONSTRAINTS: dict[str, tuple[Any, Constraint]] = {
    "json_schema": ('{"type": "object"}', Constraint("json_schema", '{"type": "object"}')),
    "regex": ("a+", Constraint("regex", "a+")),
    "grammar": ('start: "a"', Constraint("grammar", 'start: "a"')),
    "choice": (pb.Choices(values=["a", "b"]), Constraint("choice", '["a", "b"]')),
}
RESPONSE = {"logprobs": 4, "prompt_logprobs": 2}
REQUEST = {"priority": -3, "cache_salt": "salt"}
"""The rest of GenerateRequest stays at the router: names, prompt forms, what responses carry."""


async def reached(make_cluster: Any, request: pb.GenerateRequest) -> list[Request]:
    """What the engines of both pools are asked."""
    async with make_cluster("an answer") as cluster:
        await cluster.router.wait_ready()
        async with asyncio.timeout(10):
            async for _ in cluster.stub.Generate(request):
                pass
        submits = [worker.submits[0] for worker in cluster.workers]
    return [request_from_submit(submit, list(submit.prompt_ids), 1, 0.0) for submit in submits]


@pytest.mark.parametrize("kind", CONSTRAINTS)
async def test_grpc_options_reach_the_engines(make_cluster: Any, kind: str) -> None:
    source, constraint = CONSTRAINTS[kind]
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[65, 66]),
        sampling=pb.Sampling(**SAMPLING),
        stopping=pb.Stopping(**STOPPING, **AT_THE_ROUTER),
        structured_output=pb.StructuredOutput(**{kind: source}),
        response=pb.ResponseOptions(token_ids=True, **RESPONSE),
        **REQUEST,
    )
    for found in await reached(make_cluster, request):
        assert list(found.prompt_ids) == [65, 66]
        assert {name: getattr(found.sampling, name) for name in SAMPLING} == SAMPLING
        stop = {name: getattr(found.stop, name) for name in STOPPING}
        assert stop == STOPPING | {"stop_token_ids": frozenset(STOPPING["stop_token_ids"])}
        assert found.constraint == constraint
        assert (found.sampling.logprobs, found.sampling.prompt_logprobs) == (4, 2)
        assert (found.priority, found.cache_salt) == (-3, "salt")


async def test_defaults_reach_the_engines(make_cluster: Any) -> None:
    for found in await reached(make_cluster, pb.GenerateRequest(text="ab")):
        sampling, stop = found.sampling, found.stop
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.n) == (
            1.0,
            1.0,
            0,
            0.0,
            1,
        )
        penalties = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty)
        assert penalties == (0.0, 0.0, 1.0)
        assert (sampling.logit_bias, sampling.logprobs, sampling.prompt_logprobs) == ({}, None, None)
        assert (stop.max_tokens, stop.min_tokens, stop.stop_token_ids, stop.ignore_eos) == (510, 0, frozenset(), False)
        assert (found.constraint, found.priority, found.cache_salt) == (None, 0, "")


def test_tables_cover_the_messages() -> None:
    def names(message: Descriptor) -> set[str]:
        return {field.name for field in message.fields}

    assert names(pb.Sampling.DESCRIPTOR) == set(SAMPLING)
    assert names(pb.Stopping.DESCRIPTOR) == set(STOPPING) | set(AT_THE_ROUTER)
    assert names(pb.StructuredOutput.DESCRIPTOR) == set(CONSTRAINTS)
    assert names(pb.ResponseOptions.DESCRIPTOR) == {"token_ids"} | set(RESPONSE)
    prompts = {"text", "token_ids", "messages"}
    groups = {"sampling", "stopping", "structured_output", "response"}
    router = {"request_id", "model", "session_id"}
    assert names(pb.GenerateRequest.DESCRIPTOR) == prompts | groups | router | set(REQUEST)


USED: dict[str, tuple[Any, str, Any]] = {
    "model": ("tiny", "model", "tiny"),
    "temperature": (0.5, "sampling.temperature", 0.5),
    "top_p": (0.75, "sampling.top_p", 0.75),
    "n": (3, "sampling.n", 3),
    "stop": (["x", "yz"], "stopping.stop", ["x", "yz"]),
    "max_tokens": (9, "stopping.max_tokens", 9),
    "presence_penalty": (0.25, "sampling.presence_penalty", 0.25),
    "frequency_penalty": (0.5, "sampling.frequency_penalty", 0.5),
    "logit_bias": ({"5": 2.0}, "sampling.logit_bias", {5: 2.0}),
    "seed": (-1, "sampling.seed", 2**64 - 1),
    "response_format": ({"type": "json_object"}, "structured_output.json_schema", '{"type": "object"}'),
    "top_k": (7, "sampling.top_k", 7),
    "min_p": (0.125, "sampling.min_p", 0.125),
    "repetition_penalty": (1.5, "sampling.repetition_penalty", 1.5),
    "min_tokens": (2, "stopping.min_tokens", 2),
    "stop_token_ids": ([7], "stopping.stop_token_ids", [7]),
    "ignore_eos": (True, "stopping.ignore_eos", True),
    "include_stop_str_in_output": (True, "stopping.include_stop", True),
    "structured_outputs": ({"regex": "a+"}, "structured_output.regex", "a+"),
    "priority": (-2, "priority", -2),
    "cache_salt": ("s", "cache_salt", "s"),
    "session_id": ("s", "session_id", "s"),
    "request_id": ("mine", "request_id", "mine"),
}
TOOL = {"type": "function", "function": {"name": "f"}}
CHAT: dict[str, tuple[Any, str, Any]] = {
    "messages": ([{"role": "user", "content": "hi"}], "messages.messages", [pb.ChatMessage(role="user", content="hi")]),
    "max_completion_tokens": (8, "stopping.max_tokens", 8),
    "logprobs": (True, "response.logprobs", 0),
    "tools": ([TOOL], "messages.tools", [json.dumps(TOOL, separators=(",", ":"))]),
    "chat_template_kwargs": ({"x": 1}, "messages.template_arguments", '{"x": 1}'),
}
COMPLETION: dict[str, tuple[Any, str, Any]] = {
    "prompt": ([65, 66], "token_ids.ids", [65, 66]),
    "logprobs": (3, "response.logprobs", 3),
}
IGNORED = {
    name: ["x"]
    for name in (
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
    )
}
REFUSED_CHAT: dict[str, Any] = {
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "modalities": ["text", "audio"],
    "audio": {"voice": "x"},
    "prediction": {"content": "x"},
    "reasoning_effort": "high",
    "verbosity": "low",
    "web_search_options": {"size": 1},
}
REFUSED_COMPLETION: dict[str, Any] = {"suffix": "x", "best_of": 4}
FORM = {"stream", "stream_options", "skip_special_tokens"}
"""How the answer is written; ``skip_special_tokens`` only takes its default."""


def translate(kind: type[GenerationBody], **fields: Any) -> pb.GenerateRequest:
    base = {"messages": [{"role": "user", "content": "hi"}]} if kind is ChatBody else {"prompt": "hi"}
    body = parse(kind, json.dumps(base | fields).encode())
    if isinstance(body, ChatBody):
        return body.to_request("", ToolFormat.HERMES)
    assert isinstance(body, CompletionBody)
    return body.to_requests("")[0]


def at(message: Any, path: str) -> Any:
    for name in path.split("."):
        message = getattr(message, name)
    return message


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind, own in ((ChatBody, CHAT), (CompletionBody, COMPLETION)) for name in [*USED, *own]],
)
def test_openai_options_become_fields(kind: type[GenerationBody], name: str) -> None:
    value, path, wanted = (USED | (CHAT if kind is ChatBody else COMPLETION))[name]
    assert at(translate(kind, **{name: value}), path) == wanted
    assert name in {"prompt", "messages"} or translate(kind, **{name: value}) != translate(kind)


def test_openai_options_with_company() -> None:
    assert translate(ChatBody, logprobs=True, top_logprobs=5).response.logprobs == 5
    assert translate(CompletionBody, echo=True, logprobs=2).response.prompt_logprobs == 2
    assert translate(CompletionBody).stopping.max_tokens == 16
    assert translate(ChatBody, tool_choice="none", parallel_tool_calls=True) == translate(ChatBody)
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array"}}}
    assert json.loads(translate(ChatBody, response_format=schema).structured_output.json_schema) == {"type": "array"}
    for key, value in (("json", {"type": "null"}), ("grammar", 'start: "a"'), ("choice", ["a", "b"])):
        structured = translate(ChatBody, structured_outputs={key: value}).structured_output
        assert structured.WhichOneof("constraint") == {"json": "json_schema"}.get(key, key)
    with pytest.raises(InvalidRequest):
        translate(ChatBody, structured_outputs={"regex": "a"}, response_format={"type": "json_object"})


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody])
@pytest.mark.parametrize("name", IGNORED)
def test_ignored_openai_options_change_nothing(kind: type[GenerationBody], name: str) -> None:
    assert translate(kind, **{name: IGNORED[name]}) == translate(kind)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        *((ChatBody, name, value) for name, value in REFUSED_CHAT.items()),
        *((CompletionBody, name, value) for name, value in REFUSED_COMPLETION.items()),
        *((kind, "nonsense", 1) for kind in (ChatBody, CompletionBody)),
    ],
)
def test_openai_options_are_refused_by_name(kind: type[GenerationBody], name: str, value: Any) -> None:
    with pytest.raises(Unsupported, match=name) as caught:
        translate(kind, **{name: value})
    assert caught.value.field == name


def test_special_tokens_can_not_be_kept() -> None:
    with pytest.raises(InvalidRequest, match="skip_special_tokens"):
        translate(ChatBody, skip_special_tokens=False)


def test_tables_cover_the_bodies() -> None:
    common = set(USED) | set(IGNORED) | FORM
    chat = common | set(CHAT) | set(REFUSED_CHAT) | {"top_logprobs", "parallel_tool_calls", "tool_choice"}
    assert set(ChatBody.model_fields) == chat
    assert set(CompletionBody.model_fields) == common | set(COMPLETION) | set(REFUSED_COMPLETION) | {"echo"}


# docs/parity.md


def test_parity_lists_every_field_of_the_request_messages() -> None:
    messages = (pb.GenerateRequest, pb.Sampling, pb.Stopping, pb.StructuredOutput, pb.Choices, pb.ResponseOptions)
    for message in (*messages, pb.TokenIds, pb.ChatMessages, pb.ChatMessage, pb.ToolCall):
        for field in message.DESCRIPTOR.fields:
            assert f"`{message.DESCRIPTOR.name}.{field.name}`" in PARITY, "docs/parity.md lacks a field"


def test_parity_lists_every_openai_field() -> None:
    listed = {name for row in PARITY.splitlines() if row.startswith("|") for name in re.findall(r"`([a-z_]+)`", row)}
    assert set(ChatBody.model_fields) | set(CompletionBody.model_fields) <= listed


def test_parity_names_tests_that_exist() -> None:
    rows = [row for row in PARITY.splitlines() if row.startswith("| `") or row.startswith("| –")]
    assert len(rows) > 50
    for row in rows:
        tests = re.findall(r"`((?:unit|cluster|contract)/[a-z_/]+)::(test_[a-z0-9_]+)`", row)
        assert tests, f"no test is named in: {row}"
        for file, name in tests:
            text = (ROOT / "tests" / f"{file}.py").read_text(encoding="utf-8")
            assert re.search(rf"def {name}\(", text), f"{file}.py has no {name}"
