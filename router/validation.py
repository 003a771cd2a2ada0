"""Turns a public GenerateRequest into a ``ResolvedRequest``; each refusal names the field and the remedy."""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from twinpool.errors import InvalidRequest, ModelNotFound, Unavailable
from twinpool.proto import inference_pb2
from twinpool.router.conversation import conversation_chars, read_conversation
from twinpool.router.messages import Constraint, Sampling, Stopping
from twinpool.router.request import ResolvedRequest
from twinpool.router.text import ModelText

T = TypeVar("T")

MAX_LOGPROBS = 20
MAX_STOPS = 32
MAX_CHOICES = 128
MAX_REQUEST_ID = 256
MAX_STOP_CHARS = 1024
MAX_IDS = 4096
"""Entries of logit_bias and of stop_token_ids."""
MAX_NAME = 1024
"""Characters of session_id and cache_salt."""
MAX_CONSTRAINT = 256 * 1024
"""Bytes of a schema, grammar or regular expression, or of all alternatives of a choice."""
_INLINE_CHARS = 4096
"""Longer prompts are tokenised on another thread: one millisecond is the most that the event loop may lose."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the connected workers take; None where none is connected."""

    model: str | None
    max_model_len: int | None
    vocab_size: int | None
    max_num_seqs: int | None


async def resolve(request: inference_pb2.GenerateRequest, text: ModelText, limits: Limits) -> ResolvedRequest:
    """Validates ``request`` and tokenises its prompt.

    Raises:
        InvalidRequest: a field has a bad value, or the prompt is longer than the context.
        Unsupported: the model lacks what the request needs.
        ModelNotFound: another model is asked for.
        Unavailable: no worker is connected.
    """
    if limits.model is not None and request.model not in ("", limits.model):
        raise ModelNotFound(f"model {request.model!r} is not served here; served: {limits.model}")
    if limits.model is None or limits.max_model_len is None or limits.vocab_size is None:
        raise Unavailable("no worker is connected yet; start workers or wait for them (twinpool status)")
    sampling, n = _sampling(request.sampling, limits.vocab_size, limits.max_num_seqs)
    constraint = _constraint(request.structured_output)
    response = request.response
    logprobs = _count(response.logprobs if response.HasField("logprobs") else None, "logprobs")
    prompt_logprobs = _count(
        response.prompt_logprobs if response.HasField("prompt_logprobs") else None, "prompt_logprobs"
    )
    _check_request_id(request.request_id)
    for name, value in (("session_id", request.session_id), ("cache_salt", request.cache_salt)):
        _check_size(len(value), MAX_NAME, "characters", name)
    prompt_ids = await _prompt(request, text, limits.vocab_size, limits.max_model_len)
    _check_count(len(prompt_ids), "tokens", limits.max_model_len, _prompt_field(request))
    room = limits.max_model_len - len(prompt_ids)
    return ResolvedRequest(
        request_id=request.request_id or f"req-{uuid.uuid4().hex}",
        model=limits.model,
        prompt_ids=tuple(prompt_ids),
        sampling=sampling,
        n=n,
        stopping=_stopping(request.stopping, limits.vocab_size, room),
        constraint=constraint,
        want_token_ids=request.response.token_ids,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        priority=request.priority,
        session_id=request.session_id,
        cache_salt=request.cache_salt,
    )


def _prompt_field(request: inference_pb2.GenerateRequest) -> str:
    return request.WhichOneof("prompt") or "prompt"


def check_length(chars: int, text: ModelText, max_model_len: int | None, field: str) -> None:
    """Refuses text that cannot fit, before time and memory are spent on its tokens.

    Raises:
        InvalidRequest: it has more characters than ``max_model_len`` tokens stand for.
    """
    if max_model_len is not None and chars > max_model_len * text.longest_token:
        raise InvalidRequest(
            f"the prompt has {chars} characters, more than the {max_model_len} tokens of the context can stand for; "
            "shorten the prompt",
            field,
        )


def _check_count(count: int, what: str, max_model_len: int, field: str) -> None:
    if count >= max_model_len:
        raise InvalidRequest(
            f"the prompt has {count} {what} and the context holds {max_model_len} tokens, the answer included; "
            "shorten the prompt",
            field,
        )


def _check_size(size: int, most: int, what: str, field: str) -> None:
    if size > most:
        raise InvalidRequest(f"{field} has {size} {what}; at most {most}", field)


def _check_request_id(request_id: str) -> None:
    if len(request_id) > MAX_REQUEST_ID or not (request_id.isascii() and request_id.isprintable()):
        raise InvalidRequest(
            f"request_id must be printable ASCII of at most {MAX_REQUEST_ID} characters; it travels in gRPC metadata",
            "request_id",
        )


async def _prompt(
    request: inference_pb2.GenerateRequest, text: ModelText, vocab_size: int, max_model_len: int
) -> list[int]:
    kind = request.WhichOneof("prompt")
    if kind == "token_ids":
        _check_count(len(request.token_ids.ids), "tokens", max_model_len, kind)
        ids = list(request.token_ids.ids)
        _check_ids(ids, vocab_size, "token_ids")
    elif kind == "text":
        check_length(len(request.text), text, max_model_len, kind)
        ids = await _off_loop(len(request.text), text.encode_text, request.text)
    elif kind == "messages":
        _check_count(len(request.messages.messages), "messages", max_model_len, kind)  # of a token or more
        conversation = read_conversation(request.messages)
        chars = conversation_chars(request.messages)
        check_length(chars, text, max_model_len, kind)
        ids = await _off_loop(chars, text.encode_messages, conversation)
    else:
        raise InvalidRequest("there is no prompt; set one of text, token_ids, messages", "prompt")
    if not ids:
        raise InvalidRequest("the prompt is empty; it needs at least one token", _prompt_field(request))
    return ids


async def _off_loop(size: int, encode: Callable[[T], list[int]], prompt: T) -> list[int]:
    return encode(prompt) if size <= _INLINE_CHARS else await asyncio.to_thread(encode, prompt)


def _sampling(message: inference_pb2.Sampling, vocab_size: int, most: int | None) -> tuple[Sampling, int]:
    def within(name: str, given: float, default: float, low: float, high: float, open_low: bool = False) -> float:
        number = given if message.HasField(name) else default
        if not math.isfinite(number) or number > high or number < low or (open_low and number == low):
            bracket = "(" if open_low else "["
            raise InvalidRequest(f"{name} is {number:g}; it must be in {bracket}{low:g}, {high:g}]", f"sampling.{name}")
        return number

    n = message.n if message.HasField("n") else 1
    top = min(MAX_CHOICES, most or MAX_CHOICES)
    if not 1 <= n <= top:
        raise InvalidRequest(f"n is {n}; it must be from 1 to {top}", "sampling.n")
    _check_size(len(message.logit_bias), MAX_IDS, "entries", "sampling.logit_bias")
    _check_ids(message.logit_bias, vocab_size, "sampling.logit_bias")
    for token_id, bias in message.logit_bias.items():
        if not -100 <= bias <= 100:
            raise InvalidRequest(
                f"the bias of token {token_id} is {bias:g}; it must be in [-100, 100]", "sampling.logit_bias"
            )
    sampling = Sampling(
        temperature=within("temperature", message.temperature, 1.0, 0.0, 100.0),
        top_p=within("top_p", message.top_p, 1.0, 0.0, 1.0, open_low=True),
        top_k=message.top_k,
        min_p=within("min_p", message.min_p, 0.0, 0.0, 1.0),
        seed=message.seed if message.HasField("seed") else secrets.randbits(63),
        presence_penalty=within("presence_penalty", message.presence_penalty, 0.0, -2.0, 2.0),
        frequency_penalty=within("frequency_penalty", message.frequency_penalty, 0.0, -2.0, 2.0),
        repetition_penalty=within("repetition_penalty", message.repetition_penalty, 1.0, 0.0, 10.0, open_low=True),
        logit_bias=dict(message.logit_bias),
    )
    return sampling, n


def _stopping(message: inference_pb2.Stopping, vocab_size: int, room: int) -> Stopping:
    asked = message.max_tokens if message.HasField("max_tokens") else room
    if asked < 1:
        raise InvalidRequest("max_tokens is 0; it must be at least 1", "stopping.max_tokens")
    max_tokens = min(asked, room)
    if message.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {message.min_tokens}, more than the {max_tokens} tokens that max_tokens and the context "
            "leave",
            "stopping.min_tokens",
        )
    if len(message.stop) > MAX_STOPS:
        raise InvalidRequest(f"there are {len(message.stop)} stop strings; at most {MAX_STOPS}", "stopping.stop")
    if any(not stop for stop in message.stop):
        raise InvalidRequest("a stop string is empty; remove it", "stopping.stop")
    _check_size(max(map(len, message.stop), default=0), MAX_STOP_CHARS, "characters", "stopping.stop")
    _check_size(len(message.stop_token_ids), MAX_IDS, "entries", "stopping.stop_token_ids")
    _check_ids(message.stop_token_ids, vocab_size, "stopping.stop_token_ids")
    return Stopping(
        max_tokens=max_tokens,
        min_tokens=message.min_tokens,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        include_stop=message.include_stop,
    )


def _constraint(message: inference_pb2.StructuredOutput) -> Constraint | None:
    kind = message.WhichOneof("constraint")
    if kind is not None:
        _check_size(message.ByteSize(), MAX_CONSTRAINT, "bytes", f"structured_output.{kind}")
    if kind == "json_schema":
        try:
            schema = json.loads(message.json_schema)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"json_schema is not JSON: {error}", "structured_output.json_schema") from error
        if not isinstance(schema, dict | bool):
            raise InvalidRequest("json_schema must be a JSON object", "structured_output.json_schema")
        return Constraint("json_schema", message.json_schema)
    if kind == "regex":
        return Constraint("regex", _not_empty(message.regex, "regex"))
    if kind == "grammar":
        return Constraint("grammar", _not_empty(message.grammar, "grammar"))
    if kind == "choice":
        values = tuple(message.choice.values)
        if not values or "" in values:
            raise InvalidRequest(
                "choice needs at least one alternative and none may be empty", "structured_output.choice"
            )
        return Constraint("choice", values)
    return None


def _not_empty(source: str, name: str) -> str:
    if not source:
        raise InvalidRequest(f"{name} is empty", f"structured_output.{name}")
    return source


def _count(asked: int | None, name: str) -> int | None:
    if asked is not None and asked > MAX_LOGPROBS:
        raise InvalidRequest(f"{name} is {asked}; at most {MAX_LOGPROBS}", f"response.{name}")
    return asked


def _check_ids(ids: Iterable[int], vocab_size: int, field: str) -> None:
    worst = max(ids, default=0)
    if worst >= vocab_size:
        raise InvalidRequest(f"token id {worst} is outside the vocabulary of {vocab_size}", field)
