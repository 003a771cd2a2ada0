"""A model's chat template: turns a conversation into a prompt, as transformers does.

Templates come with the model and are untrusted code, so they run in jinja2's immutable sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from twinpool.errors import ConfigError, InvalidRequest, Unsupported


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a template turns into a prompt: turns and tools in OpenAI's form, and further variables of the template."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)


class ChatTemplate:
    """A compiled template with the special tokens that it may name (bos_token, eos_token, ...)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compiles ``source``.

        Raises:
            ConfigError: the template has a syntax error.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"the model's chat template does not compile (line {error.lineno}): {error}") from error
        self._special_tokens = dict(special_tokens)
        self.source = source

    def render(self, conversation: Conversation) -> str:
        """The prompt for ``conversation``, ready for the assistant's turn.

        Raises:
            InvalidRequest: the template refuses the conversation.
        """
        variables = {
            "documents": None,
            **self._special_tokens,
            **conversation.arguments,
            "messages": [dict(message) for message in conversation.messages],
            "tools": [dict(tool) for tool in conversation.tools] or None,
            "add_generation_prompt": True,
        }
        try:
            return self._template.render(variables)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise InvalidRequest(f"the model's chat template refuses the messages: {error}", "messages") from error


def missing_template() -> Unsupported:
    """The error for a model without a chat template."""
    return Unsupported("the model has no chat template; send text or token ids instead of messages", "messages")


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks assistant text for training; here its body is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it this way

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own filter, escapes no HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
