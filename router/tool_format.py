"""How a model writes tool calls: which form its chat template teaches, and the constraint that enforces it.

- ``hermes`` (Hermes, Qwen): ``<tool_call>`` lines ``{"name": ..., "arguments": {...}}`` lines ``</tool_call>``, any
  number of them, after text.
- ``llama`` (Llama 3.1 and later): the whole answer is ``{"name": ..., "parameters": {...}}``; several are divided by
  semicolons.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from typing import Any

from twinpool.proto import inference_pb2


class ToolFormat(enum.Enum):
    """See the module. The value is the key of a call's arguments."""

    HERMES = "arguments"
    LLAMA = "parameters"


FORMATS: Mapping[str, ToolFormat] = {"hermes": ToolFormat.HERMES, "llama": ToolFormat.LLAMA}
"""By the name in ``router.tool_format``."""

OPEN, CLOSE = "<tool_call>", "</tool_call>"

# Between items and around keys as in the examples of the templates; no other white space.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def detect(template: str) -> ToolFormat | None:
    """The form that a chat template (its source) teaches the model; None if it shows no tools, or in another form."""
    if "tools" not in template:
        return None
    if OPEN in template:
        return ToolFormat.HERMES
    return ToolFormat.LLAMA if '"parameters"' in template or "python_tag" in template else None


def constraint(
    form: ToolFormat, functions: Sequence[Mapping[str, Any]], several: bool
) -> inference_pb2.StructuredOutput:
    """Makes the answer a call of one of ``functions`` (name, parameters), or ``several`` calls of any of them."""
    schema = {"anyOf": [_call_schema(form, function) for function in functions]}
    if form is ToolFormat.LLAMA:
        return inference_pb2.StructuredOutput(json_schema=json.dumps({**schema, "x-guidance": _SPACING}))
    body = json.dumps({**schema, "x-guidance": _SPACING})
    repeat = 'call ("\\n" call)*' if several else "call"
    grammar = f'start: {repeat}\ncall: "{OPEN}\\n" body "\\n{CLOSE}"\nbody: %json {body}\n'
    return inference_pb2.StructuredOutput(grammar=grammar)


def _call_schema(form: ToolFormat, function: Mapping[str, Any]) -> dict[str, Any]:
    parameters = function.get("parameters") or {"type": "object"}
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, form.value: parameters},
        "required": ["name", form.value],
        "additionalProperties": False,
    }
