"""The conversation of a public request, as the chat template wants it."""

from __future__ import annotations

import json
from typing import Any

from twinpool.errors import InvalidRequest
from twinpool.proto import inference_pb2
from twinpool.router.chat_template import Conversation


def read_conversation(messages: inference_pb2.ChatMessages) -> Conversation:
    """Checks and translates; arguments of calls become objects, as templates expect them.

    Raises:
        InvalidRequest: there are no turns, a turn has no role, or what must be a JSON object is none.
    """
    if not messages.messages:
        raise InvalidRequest("messages is empty; send at least one message", "messages")
    turns = [_turn(position, message) for position, message in enumerate(messages.messages)]
    tools = [_object(tool, "messages.tools") for tool in messages.tools]
    arguments = _object(messages.template_arguments or "{}", "messages.template_arguments")
    return Conversation(turns, tools, arguments)


def conversation_chars(messages: inference_pb2.ChatMessages) -> int:
    """Characters that the prompt will have at least, about."""
    turns = sum(
        len(message.content) + sum(len(call.name) + len(call.arguments) for call in message.tool_calls)
        for message in messages.messages
    )
    return turns + sum(map(len, messages.tools))


def _turn(position: int, message: inference_pb2.ChatMessage) -> dict[str, Any]:
    if not message.role:
        raise InvalidRequest(f"message {position} has no role; set system, user, assistant or tool", "messages")
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        turn["tool_calls"] = [_call(call) for call in message.tool_calls]
    if message.tool_call_id:
        turn["tool_call_id"] = message.tool_call_id
    if message.name:
        turn["name"] = message.name
    return turn


def _call(call: inference_pb2.ToolCall) -> dict[str, Any]:
    arguments = _object(call.arguments or "{}", "messages")
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _object(text: str, field: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{field} holds something that is not JSON: {error}", field) from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"{field} holds JSON that is not an object", field)
    return value
