"""Answers in OpenAI's form: whole objects and stream events, for chat and plain completions."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from twinpool.router.answer_reader import AnswerReader, Parts, ToolCall
from twinpool.router.chunk import Chunk
from twinpool.router.messages import TokenLogprob
from twinpool.router.summary import Summary
from twinpool.router.text import ModelText

Json = dict[str, Any]


@dataclass(slots=True)
class Answer:
    """One choice, collected."""

    index: int
    text: str = ""
    finish: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    def add(self, chunk: Chunk) -> None:
        """Appends a chunk."""
        self.text += chunk.text
        self.logprobs.extend(chunk.logprobs)
        self.prompt_logprobs.extend(chunk.prompt_logprobs)
        if chunk.finish is not None:
            self.finish, self.stop_reason = chunk.finish.value, chunk.stop_reason


class Format(Protocol):
    """How one of the two APIs writes a choice."""

    kind: str
    chunk_kind: str
    id_prefix: str

    def whole(self, answer: Answer) -> Json:
        """A choice of a whole answer."""

    def delta(self, piece: Answer, first: bool) -> Json | None:
        """A choice of a stream event, ``first`` for the choice's first one; None if there is nothing to show yet."""


class Envelope:
    """What surrounds the choices of one response: id, model, usage."""

    def __init__(self, form: Format, request_id: str, model: str) -> None:
        self._form = form
        self._head = {"id": f"{form.id_prefix}-{request_id}", "created": int(time.time()), "model": model}

    def whole(self, answers: Sequence[Answer], summaries: Sequence[Summary]) -> Json:
        """The answer to a request without ``stream``."""
        return {
            **self._head,
            "object": self._form.kind,
            "choices": [self._form.whole(answer) for answer in answers],
            "usage": usage(summaries),
            "twinpool": extension(summaries),
        }

    def event(self, choices: list[Json], **extra: Any) -> Json:
        """A stream event."""
        return {**self._head, "object": self._form.chunk_kind, "choices": choices, **extra}


def inner_id(answer_id: str) -> str:
    """The id of the request whose answer over HTTP is called ``answer_id``."""
    prefix, dash, request_id = answer_id.partition("-")
    return request_id if dash and prefix in (ChatFormat.id_prefix, CompletionFormat.id_prefix) else answer_id


class ChatFormat:
    """``/v1/chat/completions``."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def __init__(self, text: ModelText, logprobs: bool, reader: Callable[[], AnswerReader]) -> None:
        """``reader`` makes what divides a choice's text into thinking, content and calls."""
        self._text = text
        self._logprobs = logprobs
        self._readers: defaultdict[int, AnswerReader] = defaultdict(reader)
        self._called: Counter[int] = Counter()

    def whole(self, answer: Answer) -> Json:
        """See ``Format``."""
        parts = self._read(answer)
        message: Json = {"role": "assistant", "content": parts.content, "refusal": None}
        if parts.reasoning:
            message["reasoning_content"] = parts.reasoning
        if parts.calls:
            message["content"] = parts.content or None
            message["tool_calls"] = [_call(call) for call in parts.calls]
        self._called[answer.index] += len(parts.calls)
        return {"index": answer.index, "message": message, **self._end(answer)}

    def delta(self, piece: Answer, first: bool) -> Json | None:
        """See ``Format``."""
        parts = self._read(piece)
        if not (parts or piece.logprobs or piece.finish is not None):
            return None
        delta: Json = {"role": "assistant"} if first else {}
        if parts.reasoning:
            delta["reasoning_content"] = parts.reasoning
        if parts.content or (first and not parts):
            delta["content"] = parts.content
        if parts.calls:
            number = self._called[piece.index]
            delta["tool_calls"] = [{"index": number + i, **_call(call)} for i, call in enumerate(parts.calls)]
            self._called[piece.index] += len(parts.calls)
        return {"index": piece.index, "delta": delta, **self._end(piece)}

    def _read(self, piece: Answer) -> Parts:
        reader = self._readers[piece.index]
        parts = reader.push(piece.text)
        if piece.finish is not None:
            rest = reader.end()
            parts = Parts(parts.reasoning + rest.reasoning, parts.content + rest.content, parts.calls + rest.calls)
        return parts

    def _end(self, answer: Answer) -> Json:
        entries = {"content": [self._entry(item) for item in answer.logprobs], "refusal": None}
        finish = "tool_calls" if answer.finish == "stop" and self._called[answer.index] else answer.finish
        return {
            "logprobs": entries if self._logprobs and answer.logprobs else None,
            "finish_reason": finish,
            "stop_reason": answer.stop_reason,
        }

    def _entry(self, item: TokenLogprob) -> Json:
        top = [self._token(token_id, logprob) for token_id, logprob in item.top]
        return {**self._token(item.token_id, item.logprob), "top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> Json:
        raw = self._text.token_bytes(token_id)
        return {"token": raw.decode("utf-8", errors="replace"), "logprob": logprob, "bytes": list(raw)}


def _call(call: ToolCall) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that is repeated in front of its answers."""

    text: str
    token_ids: Sequence[int]


class CompletionFormat:
    """``/v1/completions``; ``echoes`` holds a prompt per ``n`` choices, or nothing."""

    kind = "text_completion"
    chunk_kind = "text_completion"
    id_prefix = "cmpl"

    def __init__(self, text: ModelText, logprobs: bool, n: int, echoes: Sequence[Echo], echo_only: bool) -> None:
        self._text = text
        self._logprobs = logprobs
        self._n = n
        self._echoes = echoes
        self._echo_only = echo_only
        self._offsets: dict[int, int] = {}

    def whole(self, answer: Answer) -> Json:
        """See ``Format``."""
        return self.delta(answer, first=True)

    def delta(self, piece: Answer, first: bool) -> Json:
        """See ``Format``."""
        echo = self._echoes[piece.index // self._n] if self._echoes and first else None
        text = "" if self._echo_only else piece.text
        return {
            "index": piece.index,
            "text": text if echo is None else echo.text + text,
            "logprobs": self._entries(piece, echo) if self._logprobs else None,
            "finish_reason": piece.finish,
            "stop_reason": piece.stop_reason,
        }

    def _entries(self, piece: Answer, echo: Echo | None) -> Json:
        rows: list[tuple[int, TokenLogprob | None]] = []
        if echo is not None:
            known = piece.prompt_logprobs[-(len(echo.token_ids) - 1) :] if len(echo.token_ids) > 1 else []
            unknown: list[TokenLogprob | None] = [None] * (len(echo.token_ids) - len(known))
            rows += zip(echo.token_ids, [*unknown, *known], strict=True)
        if not self._echo_only:
            rows += [(item.token_id, item) for item in piece.logprobs]
        tokens = [self._text.token_text(token_id) for token_id, _ in rows]
        offset = self._offsets.get(piece.index, 0)
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        self._offsets[piece.index] = offset
        return {
            "tokens": tokens,
            "token_logprobs": [None if item is None else item.logprob for _, item in rows],
            "top_logprobs": [None if item is None else self._top(item) for _, item in rows],
            "text_offset": offsets,
        }

    def _top(self, item: TokenLogprob) -> dict[str, float]:
        """The best alternatives and the token itself."""
        pairs = [*item.top, (item.token_id, item.logprob)]
        return {self._text.token_text(token_id): logprob for token_id, logprob in reversed(pairs)}


def usage(summaries: Sequence[Summary]) -> Json:
    """OpenAI's usage, over all prompts of a request."""
    prompt = sum(summary.usage.prompt_tokens for summary in summaries)
    completion = sum(summary.usage.completion_tokens for summary in summaries)
    cached = sum(summary.usage.cached_tokens for summary in summaries)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def running_usage(prompt_tokens: int, completion_tokens: int) -> Json:
    """Usage in the middle of a stream."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def extension(summaries: Sequence[Summary]) -> Json:
    """Where the KV came from and where the time went; per prompt under ``requests`` when there were several."""
    items = [
        {
            "prefill_worker": summary.prefill_worker or None,
            "decode_worker": summary.decode_worker,
            "usage": asdict(summary.usage),
            "timings": asdict(summary.timings),
        }
        for summary in summaries
    ]
    return items[0] if len(items) == 1 else {"requests": items}
