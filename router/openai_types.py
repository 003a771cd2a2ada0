"""Bodies of the OpenAI-compatible HTTP API, and their translation into GenerateRequest; chat is in ``openai_chat``.

Every field that OpenAI's API or its common extensions know is listed here: used, ignored because it changes nothing
(``user``, ``metadata``, ...), or refused because it would change the answer. Unknown fields are errors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from twinpool.errors import InvalidRequest, Unsupported
from twinpool.proto import inference_pb2

_UINT64 = 1 << 64
UINT32_MAX = 0xFFFFFFFF
_MAX_PROMPTS = 1024

# Validation holds the interpreter's lock: it stops at the first bad item, and no alternative is tried in vain.
_Ids: TypeAlias = Annotated[list[int], Field(fail_fast=True)]
_Texts: TypeAlias = Annotated[list[str], Field(fail_fast=True)]
_IdLists: TypeAlias = Annotated[list[_Ids], Field(fail_fast=True)]


class Body(BaseModel):
    """A request body; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


B = TypeVar("B", bound=Body)


class StreamOptions(Body):
    """How a stream reports usage."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class JsonSchema(Body):
    """The schema of ``response_format``."""

    name: str = ""
    description: str | None = None
    json_schema: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """A constraint on the answer, in OpenAI's form."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """A constraint on the answer, in the form of vLLM's ``structured_outputs``; exactly one is set."""

    json_value: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    grammar: str | None = None
    choice: _Texts | None = None


class GenerationBody(Body):
    """What chat and plain completions share."""

    model: str = ""
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = Field(None, ge=0, le=UINT32_MAX)
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: str | _Texts | None = Field(None, union_mode="left_to_right")
    max_tokens: int | None = Field(None, ge=0, le=UINT32_MAX)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    response_format: ResponseFormat | None = None
    # Extensions
    top_k: int | None = Field(None, ge=-1, le=UINT32_MAX)
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = Field(None, ge=0, le=UINT32_MAX)
    stop_token_ids: _Ids | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: int = Field(0, ge=-(2**31), le=2**31 - 1)
    cache_salt: str | None = None
    session_id: str | None = None
    request_id: str | None = None
    skip_special_tokens: Literal[True] = True
    # Ignored: they change nothing in the answer
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None

    def generate_request(self, header_id: str) -> inference_pb2.GenerateRequest:
        """The request without prompt, logprobs and max_tokens, which the two APIs name differently.

        Raises:
            InvalidRequest: two constraints, or an id that no token can have.
        """
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        for token_id in [*(self.logit_bias or ()), *(self.stop_token_ids or ())]:
            if not 0 <= token_id <= UINT32_MAX:
                raise InvalidRequest(
                    f"{token_id} is no token id", "logit_bias" if self.logit_bias else "stop_token_ids"
                )
        request = inference_pb2.GenerateRequest(
            request_id=self.request_id or header_id,
            model=self.model,
            sampling=inference_pb2.Sampling(
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=None if self.top_k == -1 else self.top_k,
                min_p=self.min_p,
                seed=None if self.seed is None else self.seed % _UINT64,
                n=self.n,
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
                repetition_penalty=self.repetition_penalty,
                logit_bias=self.logit_bias,
            ),
            stopping=inference_pb2.Stopping(
                min_tokens=self.min_tokens,
                stop=stop,
                stop_token_ids=self.stop_token_ids,
                ignore_eos=self.ignore_eos,
                include_stop=self.include_stop_str_in_output,
            ),
            priority=self.priority,
            session_id=self.session_id or "",
            cache_salt=self.cache_salt or "",
        )
        constraint = self._constraint()
        if constraint is not None:
            request.structured_output.CopyFrom(constraint)
        if self.stream and self.stream_options is not None and self.stream_options.continuous_usage_stats:
            request.response.token_ids = True
        return request

    def _constraint(self) -> inference_pb2.StructuredOutput | None:
        chosen = [] if self.response_format is None else _from_response_format(self.response_format)
        if self.structured_outputs is not None:
            chosen += _from_structured_outputs(self.structured_outputs)
        if len(chosen) > 1:
            raise InvalidRequest("only one constraint can be given", "response_format")
        return chosen[0] if chosen else None

    def refuse(self, **fields: Any) -> None:
        """Raises Unsupported for each field that is set; null and empty values ask for nothing."""
        for name, value in fields.items():
            if value:
                raise Unsupported(f"{name} is not supported; remove it", name)


class CompletionBody(GenerationBody):
    """Body of ``/v1/completions``."""

    prompt: str | _Ids | _Texts | _IdLists = Field(union_mode="left_to_right")
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=UINT32_MAX)
    # Refused when set
    suffix: Any = None
    best_of: int | None = None

    @property
    def echo_only(self) -> bool:
        """Whether only the prompt is wanted (``max_tokens`` 0 with ``echo``): the one token made is not shown."""
        return self.echo and self.max_tokens == 0

    def to_requests(self, header_id: str) -> list[inference_pb2.GenerateRequest]:
        """One public request per prompt.

        Raises:
            InvalidRequest, Unsupported: see ``GenerationBody``.
        """
        self.refuse(suffix=self.suffix, best_of=None if self.best_of in (None, self.n or 1) else self.best_of)
        base = self.generate_request(header_id)
        # 16 is what OpenAI's API documents for plain completions.
        base.stopping.max_tokens = 1 if self.echo_only else 16 if self.max_tokens is None else self.max_tokens
        if self.logprobs is not None:
            base.response.logprobs = self.logprobs
            if self.echo:
                base.response.prompt_logprobs = self.logprobs
        prompts = _split_prompts(self.prompt)
        if not prompts:
            raise InvalidRequest("prompt is empty", "prompt")
        if len(prompts) > _MAX_PROMPTS:
            raise InvalidRequest(f"there are {len(prompts)} prompts; at most {_MAX_PROMPTS} in one call", "prompt")
        requests = []
        for number, prompt in enumerate(prompts):
            request = inference_pb2.GenerateRequest()
            request.CopyFrom(base)
            if len(prompts) > 1 and base.request_id:
                request.request_id = f"{base.request_id}-{number}"
            if isinstance(prompt, str):
                request.text = prompt
            else:
                _check_token_ids(prompt, "prompt")
                request.token_ids.ids.extend(prompt)
            requests.append(request)
        return requests


class DetokenizeBody(Body):
    """Body of ``/detokenize``."""

    model: str = ""
    tokens: _Ids


def parse(kind: type[B], body: bytes) -> B:
    """Reads a body.

    Raises:
        InvalidRequest: not JSON, a bad value, or an unknown field, which it names.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]]
        path = "".join(parts).removeprefix(".") or "body"
        field = str(first["loc"][0]) if first["loc"] else ""
        if first["type"] == "extra_forbidden":
            raise Unsupported(f"{path} is not a known field; remove it", field) from error
        raise InvalidRequest(f"{path}: {first['msg'].removeprefix('Value error, ')}", field) from error


def _split_prompts(prompt: str | list[int] | list[str] | list[list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    texts_or_lists = [item for item in prompt if not isinstance(item, int)]
    if texts_or_lists:
        return list(texts_or_lists)
    ids = [item for item in prompt if isinstance(item, int)]
    return [ids] if ids else []


def _check_token_ids(ids: Iterable[int], field: str) -> None:
    for token_id in ids:
        if not 0 <= token_id <= UINT32_MAX:
            raise InvalidRequest(f"{token_id} is no token id", field)


def _from_response_format(form: ResponseFormat) -> list[inference_pb2.StructuredOutput]:
    if form.type == "text":
        return []
    if form.type == "json_object":
        return [inference_pb2.StructuredOutput(json_schema='{"type": "object"}')]
    if form.json_schema is None or form.json_schema.json_schema is None:
        raise InvalidRequest("response_format of type json_schema needs json_schema.schema", "response_format")
    return [inference_pb2.StructuredOutput(json_schema=json.dumps(form.json_schema.json_schema))]


def _from_structured_outputs(form: StructuredOutputs) -> list[inference_pb2.StructuredOutput]:
    chosen = []
    if form.json_value is not None:
        schema = form.json_value if isinstance(form.json_value, str) else json.dumps(form.json_value)
        chosen.append(inference_pb2.StructuredOutput(json_schema=schema))
    if form.regex is not None:
        chosen.append(inference_pb2.StructuredOutput(regex=form.regex))
    if form.grammar is not None:
        chosen.append(inference_pb2.StructuredOutput(grammar=form.grammar))
    if form.choice is not None:
        chosen.append(inference_pb2.StructuredOutput(choice=inference_pb2.Choices(values=form.choice)))
    return chosen
