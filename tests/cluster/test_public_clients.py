"""Programs of others, unmodified, against a real deployment: OpenAI's SDK and ``buf curl``."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest

from clusters import Cluster

TEMPLATE = (
    "{% if tools %}Answer <tool_call>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tool_call>{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function.name }}"
    "{% endfor %}\n{% endfor %}assistant: "
)
CITIES = {"type": "string", "enum": ["Bern", "Rome"]}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": CITIES}, "required": ["city"]},
    },
}
HELLO: Any = [{"role": "user", "content": "hello"}]
CANCELLED = 'twinpool_router_requests_total{outcome="cancelled"}'
GREEDY: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, make_tiny_llama: Any) -> Iterator[Cluster]:
    folder = make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    cluster = Cluster.of(tmp_path_factory.mktemp("clients"), folder)
    with cluster.running():
        yield cluster


@pytest.fixture
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{cluster.http_port}/v1", api_key="none", timeout=120) as client:
        yield client


def test_openai_models_chat_and_streams(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id).id == model.id == "tiny"
    whole = client.chat.completions.create(model=model.id, messages=HELLO, max_tokens=12, **GREEDY)
    assert whole.usage is not None
    assert (whole.usage.completion_tokens, whole.choices[0].finish_reason) == (12, "length")
    assert whole.choices[0].message.role == "assistant"
    usage = {"include_usage": True}
    text, last = "", None
    for chunk in client.chat.completions.create(
        model=model.id, messages=HELLO, max_completion_tokens=12, stream=True, stream_options=usage, **GREEDY
    ):
        last = chunk
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert last is not None
    assert last.usage is not None
    assert (last.usage.total_tokens, last.choices) == (whole.usage.total_tokens, [])
    two = client.chat.completions.create(
        model=model.id, messages=HELLO, n=2, seed=1, max_tokens=5, logprobs=True, top_logprobs=2
    )
    assert [choice.index for choice in two.choices] == [0, 1]
    assert two.choices[1].logprobs is not None
    assert two.choices[1].logprobs.content is not None
    assert len(two.choices[1].logprobs.content[0].top_logprobs) == 2
    with pytest.raises(openai.NotFoundError, match="no-such"):
        client.chat.completions.create(model="no-such", messages=HELLO)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=model.id, messages=HELLO, temperature=-1)
    assert caught.value.param == "temperature"


def test_openai_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=["one two", "three"], max_tokens=4, logprobs=1, **GREEDY)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.tokens or []) == 4
    pieces = client.completions.create(model="tiny", prompt="one two", max_tokens=4, stream=True, **GREEDY)
    assert "".join(piece.choices[0].text for piece in pieces) == answer.choices[0].text
    scored = client.completions.create(model="tiny", prompt=[1, 2, 3], max_tokens=0, echo=True, logprobs=1)
    assert scored.choices[0].logprobs is not None
    assert [value is None for value in scored.choices[0].logprobs.token_logprobs or []] == [True, False, False]


def test_openai_tools(client: openai.OpenAI) -> None:
    asked = client.chat.completions.create(
        model="tiny", messages=HELLO, tools=[WEATHER], tool_choice="required", max_tokens=200, seed=1
    )
    assert asked.choices[0].finish_reason == "tool_calls"
    calls = asked.choices[0].message.tool_calls
    assert calls is not None
    call: Any = calls[0]
    assert call.function.name == "weather"
    city = json.loads(call.function.arguments)["city"]
    assert city in CITIES["enum"]
    # The SDK's own message goes back as it is, with the tool's answer behind it.
    turns: list[Any] = [*HELLO, asked.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sun"}]
    answer = client.chat.completions.create(model="tiny", messages=turns, tools=[WEATHER], max_tokens=5, **GREEDY)
    assert answer.choices[0].message.content
    with client.chat.completions.stream(
        model="tiny",
        messages=HELLO,
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        max_tokens=200,
        seed=1,
    ) as stream:
        for _ in stream:
            pass
        streamed: Any = stream.get_final_completion().choices[0].message.tool_calls
    assert (streamed[0].function.name, streamed[0].function.arguments) == ("weather", call.function.arguments)


class City(pydantic.BaseModel):
    name: Literal["Bern", "Rome"]
    is_capital: bool


def test_openai_structured_output(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(model="tiny", messages=HELLO, response_format=City, max_tokens=300, seed=3)
    assert isinstance(parsed.choices[0].message.parsed, City)
    with client.chat.completions.stream(
        model="tiny", messages=HELLO, response_format=City, max_tokens=300, seed=3
    ) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.parsed == parsed.choices[0].message.parsed


async def test_openai_async_client_cancels_by_closing(cluster: Cluster) -> None:
    before = (await cluster.metrics()).get(CANCELLED, 0.0)
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{cluster.http_port}/v1", api_key="none") as client:
        stream = await client.chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=400, stream=True, **GREEDY
        )
        async with stream:
            async for _ in stream:
                break
        await cluster.all_free()
    assert (await cluster.metrics())[CANCELLED] == before + 1


def test_buf_curl(cluster: Cluster) -> None:
    """It knows no schema of ours: the router's reflection tells it."""
    buf = shutil.which("buf", path=str(Path(sys.executable).parent)) or shutil.which("buf")
    assert buf is not None, "buf comes with the extra dev"

    def curl(method: str, request: dict[str, Any]) -> list[dict[str, Any]]:
        url = f"http://{cluster.address}/twinpool.inference.v1.{method}"
        command = [buf, "curl", "--protocol", "grpc", "--http2-prior-knowledge", "-d", "@-", url]
        done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        decoder, text, found = json.JSONDecoder(), done.stdout.strip(), []
        while text:
            message, end = decoder.raw_decode(text)
            found.append(message)
            text = text[end:].lstrip()
        return found

    (models,) = curl("InfoService/ListModels", {})
    assert models["models"][0]["id"] == "tiny"
    request = {"text": "hello", "sampling": {"temperature": 0}, "stopping": {"maxTokens": 6, "ignoreEos": True}}
    answers = curl("InferenceService/Generate", request)
    assert answers[-1]["usage"]["completionTokens"] == 6
    assert answers[-1]["finishReason"] == "FINISH_REASON_LENGTH"
    (status,) = curl("InfoService/GetStatus", {})
    assert {worker["state"] for worker in status["workers"]} == {"alive"}
