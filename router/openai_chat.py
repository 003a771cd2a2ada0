"""Bodies with a conversation: turns, tools, and their translation into GenerateRequest."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from twinpool.errors import InvalidRequest, Unsupported
from twinpool.proto import inference_pb2
from twinpool.router.openai_types import UINT32_MAX, Body, GenerationBody
from twinpool.router.tool_format import ToolFormat, constraint


class TextPart(Body):
    """A part of a message; only text can be read."""

    type: str
    text: str = ""
    image_url: Any = None
    input_audio: Any = None
    file: Any = None


class CalledFunction(Body):
    """What an earlier turn called; ``arguments`` is JSON text."""

    name: str
    arguments: str = "{}"


class CalledTool(Body):
    """A call in an assistant's turn."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Any = None


class ChatMessage(Body):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None
    function_call: Any = None
    # Ignored: answers carry them, so clients send them back
    refusal: Any = None
    audio: Any = None
    annotations: Any = None
    reasoning_content: Any = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        others = (self.tool_calls, self.function_call, self.refusal, self.audio, self.reasoning_content)
        if self.content is None and not (self.role == "assistant" and any(others)):
            raise ValueError(f"a message of role {self.role} needs content")
        if self.content == []:
            raise ValueError("content has no parts; send text")
        return self

    @property
    def text(self) -> str:
        """The content as text.

        Raises:
            Unsupported: there is something else in it.
        """
        if self.function_call:
            raise Unsupported("messages with function_call are not supported; send tool_calls", "messages")
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        for part in self.content:
            if part.type != "text":
                raise Unsupported(f"message parts of type {part.type} are not supported; send text", "messages")
        return "\n".join(part.text for part in self.content)

    def to_proto(self) -> inference_pb2.ChatMessage:
        """The public message. Raises Unsupported: see ``text``."""
        calls = [
            inference_pb2.ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
            for call in self.tool_calls or ()
        ]
        return inference_pb2.ChatMessage(
            role=self.role,
            content=self.text,
            tool_calls=calls,
            tool_call_id=self.tool_call_id or "",
            name=(self.name or "") if self.role == "tool" else "",
        )


class Function(Body):
    """A function that the model may call; ``parameters`` is a JSON schema."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """Names a function."""

    name: str


class NamedTool(Body):
    """The tool that must be called."""

    type: Literal["function"] = "function"
    function: NamedFunction


class ChatBody(GenerationBody):
    """Body of ``/v1/chat/completions``."""

    messages: list[ChatMessage] = Field(fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=0, le=UINT32_MAX)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=UINT32_MAX)
    tools: list[Tool] | None = Field(None, fail_fast=True)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Refused when set
    functions: Any = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None

    @property
    def offers_tools(self) -> bool:
        """Whether the model may call tools."""
        return bool(self.tools) and self.tool_choice != "none"

    def to_request(self, header_id: str, form: ToolFormat | None) -> inference_pb2.GenerateRequest:
        """The public request; ``form`` is how the model writes tool calls.

        Raises:
            InvalidRequest, Unsupported: see ``GenerationBody``; tools, but the model knows no form of calls.
        """
        self.refuse(
            functions=self.functions,
            function_call=None if self.function_call in ("none", "auto") else self.function_call,
            modalities=None if self.modalities == ["text"] else self.modalities,
            audio=self.audio,
            prediction=self.prediction,
            reasoning_effort=self.reasoning_effort,
            verbosity=self.verbosity,
            web_search_options=self.web_search_options,
        )
        request = self.generate_request(header_id)
        request.messages.CopyFrom(
            inference_pb2.ChatMessages(
                messages=[message.to_proto() for message in self.messages],
                template_arguments=json.dumps(self.chat_template_kwargs) if self.chat_template_kwargs else "",
            )
        )
        self._add_tools(request, form)
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if limit is not None:
            request.stopping.max_tokens = limit
        if self.logprobs:
            request.response.logprobs = self.top_logprobs or 0
        elif self.top_logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", "top_logprobs")
        return request

    def _add_tools(self, request: inference_pb2.GenerateRequest, form: ToolFormat | None) -> None:
        must_call = self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)
        if must_call and not self.tools:
            raise InvalidRequest("tool_choice asks for a call, but there are no tools", "tool_choice")
        if not self.offers_tools or self.tools is None:
            return
        if form is None:
            raise Unsupported(
                "the model's chat template shows no tools in a form that is known here; use a model that does, or say "
                "how this one writes calls (router.tool_format)",
                "tools",
            )
        request.messages.tools.extend(tool.model_dump_json(exclude_none=True) for tool in self.tools)
        if not must_call:
            return
        if request.HasField("structured_output"):
            raise InvalidRequest("a required tool call and another constraint exclude each other", "tool_choice")
        several = self.tool_choice == "required" and self.parallel_tool_calls is not False
        functions = [function.model_dump() for function in self._chosen(self.tools)]
        request.structured_output.CopyFrom(constraint(form, functions, several))

    def _chosen(self, tools: Sequence[Tool]) -> list[Function]:
        functions = [tool.function for tool in tools]
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            functions = [function for function in functions if function.name == name]
            if not functions:
                raise InvalidRequest(f"tool_choice names {name!r}, which is not among the tools", "tool_choice")
        return functions


class TokenizeBody(Body):
    """Body of ``/tokenize``."""

    model: str = ""
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] | None = None
