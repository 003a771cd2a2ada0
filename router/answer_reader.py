"""Reads a chat answer as it comes: thinking, content, tool calls.

One reader per choice: ``push`` takes text and hands out what is certain; what may yet become a tag or a call is held
back until it is decided, at the latest by ``end``. Text that looks like a call and is none comes out as content, so
nothing of an answer is lost.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from twinpool.router.tool_format import CLOSE, OPEN, ToolFormat

THINK, END_THINK = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call: ``arguments`` is JSON text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


@dataclass(slots=True)
class Parts:
    """What is new in an answer."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


class AnswerReader:
    """See the module. Without a form no calls are looked for; ``thinks``: the model marks its thinking with tags.

    ``thinking``: the prompt ended inside of such tags.
    """

    def __init__(self, form: ToolFormat | None = None, thinks: bool = False, thinking: bool = False) -> None:
        self._form = form
        self._held = ""
        self._thinking = thinking
        # Thinking comes first or not at all.
        self._may_think = thinks and not thinking
        self._after_tag = thinking
        self._started = False
        self._called = False

    def push(self, text: str) -> Parts:
        """Takes the next piece of the answer."""
        self._held += text
        parts = Parts()
        while self._step(parts):
            pass
        return parts

    def end(self) -> Parts:
        """The answer is over: hands out the rest."""
        parts = self.push("")
        rest, self._held = self._held, ""
        if self._thinking:
            parts.reasoning += rest
        elif self._form is ToolFormat.LLAMA and (calls := _llama_calls(rest)):
            parts.calls += calls
        elif self._form is ToolFormat.HERMES and rest.startswith(OPEN) and (call := _hermes_call(rest[len(OPEN) :])):
            parts.calls.append(call)  # a stop string or the limit cut the closing tag off
        elif rest.strip() or not self._called:
            parts.content += rest
        return parts

    def _step(self, parts: Parts) -> bool:
        """Moves what is certain from the held text to ``parts``; True if there may be more to move."""
        if self._after_tag:
            self._held = self._held.lstrip("\n")
            self._after_tag = not self._held
        if self._thinking:
            return self._think(parts)
        if self._may_think:
            bare = self._held.lstrip()
            if bare.startswith(THINK):
                self._held, self._thinking, self._may_think = bare[len(THINK) :], True, False
                self._after_tag = True
                return True
            self._may_think = THINK.startswith(bare)
            return not self._may_think
        if self._form is ToolFormat.LLAMA and not self._started and (bare := self._held.lstrip())[:1] in ("", "{"):
            return False  # perhaps a call: the end tells
        if self._form is ToolFormat.HERMES:
            return self._hermes(parts)
        self._started = True
        parts.content += self._held
        self._held = ""
        return False

    def _think(self, parts: Parts) -> bool:
        before, tag, after = self._held.partition(END_THINK)
        if tag:
            parts.reasoning += before
            self._held, self._thinking, self._after_tag = after, False, True
            return True
        keep = _overlap(self._held, END_THINK)
        parts.reasoning += self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return False

    def _hermes(self, parts: Parts) -> bool:
        start = self._held.find(OPEN)
        if start > 0:
            parts.content += self._held[:start].rstrip()  # between content and calls
            self._held = self._held[start:]
        if start >= 0:
            inside, tag, after = self._held[len(OPEN) :].partition(CLOSE)
            if not tag:
                return False
            call = _hermes_call(inside)
            if call is None:
                parts.content += OPEN + inside + CLOSE
            else:
                parts.calls.append(call)
                self._called = True
            self._held = after
            return True
        keep = max(_overlap(self._held, OPEN), len(self._held) - len(self._held.rstrip()))
        parts.content += self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return False


def _overlap(text: str, tag: str) -> int:
    """How much of the end of ``text`` may be the beginning of ``tag``, with white space before it counted."""
    for size in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:size]):
            head = text[:-size]
            return size + len(head) - len(head.rstrip())
    return 0


def _hermes_call(text: str) -> ToolCall | None:
    try:
        return _call(json.loads(text), ToolFormat.HERMES)
    except (ValueError, RecursionError):
        return None


def _llama_calls(text: str) -> list[ToolCall]:
    """The calls of an answer that consists of nothing else; empty if it does."""
    try:
        calls = [_call(value, ToolFormat.LLAMA) for value in _values(text)]
    except (ValueError, RecursionError):
        return []
    return [call for call in calls if call is not None] if None not in calls else []


def _values(text: str) -> Iterator[Any]:
    decoder = json.JSONDecoder()
    text = text.strip()
    while text:
        value, end = decoder.raw_decode(text)
        yield value
        text = text[end:].lstrip().removeprefix(";").lstrip()


def _call(value: Any, form: ToolFormat) -> ToolCall | None:
    """The call that ``value`` describes; None if it is none."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    other = next(item for item in ToolFormat if item is not form)
    arguments = value.get(form.value, value.get(other.value, {}))
    if not isinstance(arguments, dict | str):
        return None
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(value["name"], text)
