"""Tools and thinking: what the model writes, in pieces of any size, becomes calls, reasoning and content."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import httpx
import llguidance
import numpy as np
import pytest

from twinpool.errors import InvalidRequest, Unsupported
from twinpool.router.answer_reader import AnswerReader, Parts
from twinpool.router.openai_chat import ChatBody
from twinpool.router.openai_types import parse
from twinpool.router.tool_format import ToolFormat, constraint, detect

HERMES, LLAMA = ToolFormat.HERMES, ToolFormat.LLAMA
WEATHER = {
    "name": "weather",
    "description": "Tells the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"]},
}
CLOCK = {"name": "clock", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
TOOLS = [{"type": "function", "function": WEATHER}, {"type": "function", "function": CLOCK}]
TEMPLATE = (
    "{% if tools %}<tool_call>{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.name }} {{ call.function.arguments.city }}]{% endfor %}"
    "{% endfor %}{% if enable_thinking %}</think>{% endif %}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'


def read(reader: AnswerReader, text: str, sizes: random.Random | None) -> tuple[str, str, list[tuple[str, Any]]]:
    """Reasoning, content and calls of ``text``, pushed whole or in pieces."""
    whole = Parts()
    while text or sizes is None:
        size = len(text) if sizes is None else sizes.randint(1, 5)
        piece, text = text[:size], text[size:]
        for part in (reader.push(piece), *([] if text else [reader.end()])):
            whole.reasoning += part.reasoning
            whole.content += part.content
            whole.calls += part.calls
        if not text:
            break
    return whole.reasoning, whole.content, [(call.name, json.loads(call.arguments)) for call in whole.calls]


BERN = ("weather", {"city": "Bern"})


@pytest.mark.parametrize("piecewise", [False, True])
@pytest.mark.parametrize(
    ("options", "text", "wanted"),
    [
        ((HERMES,), CALL, ("", "", [BERN])),
        ((HERMES,), f"Let me see.\n{CALL}\n{CALL}", ("", "Let me see.", [BERN, BERN])),
        ((HERMES,), CALL.removesuffix("</tool_call>"), ("", "", [BERN])),
        ((HERMES,), "a < b, <tool> and <tool_cal", ("", "a < b, <tool> and <tool_cal", [])),
        ((HERMES,), "<tool_call>{nonsense</tool_call> x", ("", "<tool_call>{nonsense</tool_call> x", [])),
        ((HERMES,), "two\n\nlines ", ("", "two\n\nlines ", [])),
        ((LLAMA,), '{"name": "weather", "parameters": {"city": "Bern"}}', ("", "", [BERN])),
        ((LLAMA,), '{"name": "t", "parameters": {}}; {"name": "t", "parameters": {}}', ("", "", 2 * [("t", {})])),
        ((LLAMA,), '{"answer": 1}', ("", '{"answer": 1}', [])),
        ((LLAMA,), 'It is {"name": "x"}.', ("", 'It is {"name": "x"}.', [])),
        ((None, True), "<think>\nhm\n</think>\n\nYes <think>", ("hm\n", "Yes <think>", [])),
        ((None, True, True), "hm</thin k></think>Yes", ("hm</thin k>", "Yes", [])),
        ((None, True), "<thin air", ("", "<thin air", [])),
        ((None, True, True), "never ends", ("never ends", "", [])),
        ((HERMES, True), f"<think>x</think>\n{CALL}", ("x", "", [BERN])),
        ((), "<think><tool_call>", ("", "<think><tool_call>", [])),
    ],
)  # fmt: skip
def test_readers(options: tuple[Any, ...], text: str, wanted: Any, piecewise: bool) -> None:
    for seed in range(20 if piecewise else 1):
        assert read(AnswerReader(*options), text, random.Random(seed) if piecewise else None) == wanted


def test_text_is_not_held_back_longer_than_needed() -> None:
    reader = AnswerReader(HERMES, thinks=True)
    assert reader.push("Hello").content == "Hello"
    assert reader.push(" world <").content == " world"
    assert reader.push("3").content == " <3"


def test_forms_are_seen_in_templates() -> None:
    assert detect(TEMPLATE) is HERMES
    assert detect('{% if tools %}{"name": ..., "parameters": ...}{% endif %}') is LLAMA
    assert detect("{{ messages }}") is None


@pytest.mark.parametrize("form", ToolFormat)
@pytest.mark.parametrize("several", [False, True])
def test_required_calls_are_valid_whatever_the_model_prefers(form: ToolFormat, several: bool, tokenizer: Any) -> None:
    """Random tokens among those that are allowed, until the end is: a call each time."""
    source = constraint(form, [WEATHER, CLOCK], several)
    made = llguidance.LLTokenizer(tokenizer.to_str(), eos_token=(eos := tokenizer.token_to_id("<|im_end|>")))
    draw = random.Random(5)
    for _ in range(6):
        grammar = (
            llguidance.LLMatcher.grammar_from_json_schema(source.json_schema)
            if source.WhichOneof("constraint") == "json_schema"
            else llguidance.LLMatcher.grammar_from_lark(source.grammar)
        )
        matcher, ids = llguidance.LLMatcher(made, grammar), []
        assert not matcher.get_error()
        while True:
            mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            allowed = [token for token in np.flatnonzero(mask).tolist() if token < tokenizer.get_vocab_size()]
            token = eos if eos in allowed and draw.random() < 0.7 else draw.choice(allowed)
            if token == eos:
                break
            ids.append(token)
            matcher.consume_token(token)
        _, content, calls = read(AnswerReader(form), tokenizer.decode(ids), None)
        assert content == ""
        assert len(calls) == 1 or several
        for name, arguments in calls:
            assert name == "clock" or (name == "weather" and isinstance(arguments["city"], str))


def body(**fields: Any) -> ChatBody:
    return parse(ChatBody, json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}).encode())


def test_choice_becomes_a_constraint() -> None:
    auto = body(tools=TOOLS).to_request("", HERMES)
    assert not auto.HasField("structured_output")
    assert [json.loads(tool)["function"]["name"] for tool in auto.messages.tools] == ["weather", "clock"]
    named = body(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "clock"}}).to_request("", HERMES)
    assert "weather" not in named.structured_output.grammar
    required = body(tools=TOOLS, tool_choice="required", parallel_tool_calls=False).to_request("", HERMES)
    assert "weather" in required.structured_output.grammar
    assert ")*" not in required.structured_output.grammar
    assert not body(tools=TOOLS, tool_choice="none").to_request("", None).messages.tools


@pytest.mark.parametrize(
    ("fields", "form", "error", "field"),
    [
        ({"tools": TOOLS}, None, Unsupported, "tools"),
        ({"tool_choice": "required"}, HERMES, InvalidRequest, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"function": {"name": "x"}}}, HERMES, InvalidRequest, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
            HERMES,
            InvalidRequest,
            "tool_choice",
        ),
    ],
)
def test_tools_that_cannot_be_used(fields: Any, form: ToolFormat | None, error: type[Exception], field: str) -> None:
    with pytest.raises(error) as caught:
        body(**fields).to_request("", form)
    assert getattr(caught.value, "field", None) == field


@pytest.fixture
def tool_folder(model_folder: Path, tmp_path: Path) -> Path:
    for path in model_folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


@pytest.fixture
def model_with_tools(make_cluster_of: Any, tool_folder: Path) -> Any:
    return make_cluster_of(tool_folder)


def room(cluster: Any) -> None:
    for worker in cluster.workers:
        worker.max_model_len = 2048


async def test_a_conversation_with_calls(model_with_tools: Any, tokenizer: Any) -> None:
    turns = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    asked = {"messages": turns, "tools": TOOLS}
    async with (
        model_with_tools(f"<think>hm</think>\nOne moment.\n{CALL}\n{CALL}", setup=room) as cluster,
        httpx.AsyncClient(base_url=cluster.http_url) as client,
    ):
        await cluster.router.wait_ready()
        answer = (await client.post("/v1/chat/completions", json=asked)).json()
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "One moment."
        assert choice["message"]["reasoning_content"] == "hm"
        calls = choice["message"]["tool_calls"]
        assert [call["function"] for call in calls] == [{"name": "weather", "arguments": '{"city": "Bern"}'}] * 2
        assert len({call["id"] for call in calls}) == 2
        prompt = tokenizer.decode(list(cluster.workers[0].submits[0].prompt_ids))
        assert prompt.endswith("user:Weather?assistant:[weather Rome]tool:rain")
        assert '"description": "Tells the weather."' in prompt

        text = (await client.post("/v1/chat/completions", json=asked | {"stream": True})).text
        events = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
        deltas = [choice["delta"] for event in events for choice in event["choices"]]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm"
        assert "".join(delta.get("content", "") for delta in deltas) == "One moment."
        streamed = [call for delta in deltas for call in delta.get("tool_calls", [])]
        assert [call["index"] for call in streamed] == [0, 1]
        assert [delta.get("role") for delta in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
        assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"

        plain = (await client.post("/v1/chat/completions", json={"messages": turns})).json()["choices"][0]
        assert plain["finish_reason"] == "stop"
        assert plain["message"]["content"].endswith(CALL)


async def test_template_arguments_and_an_open_thought(model_with_tools: Any, tokenizer: Any) -> None:
    turns = [{"role": "user", "content": "<think>"}]
    async with (
        model_with_tools("hm</think>Yes") as cluster,
        httpx.AsyncClient(base_url=cluster.http_url) as client,
    ):
        await cluster.router.wait_ready()
        answer = (await client.post("/v1/chat/completions", json={"messages": turns})).json()["choices"][0]["message"]
        assert (answer["reasoning_content"], answer["content"]) == ("hm", "Yes")
        asked = {"messages": turns, "chat_template_kwargs": {"enable_thinking": True}}
        answer = (await client.post("/v1/chat/completions", json=asked)).json()["choices"][0]["message"]
        assert answer["content"] == "hm</think>Yes"
        prompt = tokenizer.decode(list(cluster.workers[0].submits[-1].prompt_ids))
        assert prompt == "user:<think></think>"
