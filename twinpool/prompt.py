"""What the Python client sends: a prompt and keyword options, turned into a GenerateRequest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

from twinpool.proto import inference_pb2 as pb


class Message(TypedDict):
    """One turn of a conversation; ``role`` is system, user, assistant or tool."""

    role: str
    content: str


Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]


class Options(TypedDict, total=False):
    """Keyword arguments of ``generate``, ``stream`` and ``chat``; what is left out takes the server's default."""

    model: str
    """Model name; the served one if left out."""
    temperature: float
    """Divides the logits; 0 is greedy."""
    top_p: float
    top_k: int
    min_p: float
    seed: int
    """Makes the output a function of the prompt."""
    n: int
    """Number of answers."""
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    max_tokens: int
    min_tokens: int
    stop: str | Sequence[str]
    """Strings that end the answer."""
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop: bool
    """Leaves the stop string in the text."""
    json_schema: str
    """A JSON schema, as JSON text, that the answer must satisfy."""
    regex: str
    grammar: str
    """A Lark grammar with a rule named start."""
    choice: Sequence[str]
    logprobs: int
    """Log probabilities of the tokens and of this many most likely ones."""
    prompt_logprobs: int
    priority: int
    """Smaller is served first."""
    session_id: str
    cache_salt: str
    request_id: str
    timeout: float
    """Seconds until DeadlineExceeded, queueing and retries included."""


_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
)
_STOPPING = ("max_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "include_stop")
_CONSTRAINTS = ("json_schema", "regex", "grammar")
_RESPONSE = ("logprobs", "prompt_logprobs")
_REQUEST = ("model", "priority", "session_id", "cache_salt", "request_id")
_KNOWN = {*_SAMPLING, *_STOPPING, *_CONSTRAINTS, *_RESPONSE, *_REQUEST, "stop", "choice", "timeout"}


def to_request(prompt: Prompt, options: Options) -> pb.GenerateRequest:
    """Builds the request; token ids are always asked for.

    Raises:
        TypeError: an unknown option, or a prompt that is neither text, token ids nor messages.
        ValueError: an option is outside its wire type's range.
    """
    if unknown := sorted(options.keys() - _KNOWN):
        raise TypeError(f"unknown option {unknown[0]}; the options are {', '.join(sorted(_KNOWN))}")
    given = {name: value for name, value in options.items() if value is not None}

    def take(names: Sequence[str]) -> dict[str, Any]:
        return {name: given[name] for name in names if name in given}

    stop = options.get("stop") or ()
    request = pb.GenerateRequest(
        sampling=pb.Sampling(**take(_SAMPLING)),
        stopping=pb.Stopping(stop=[stop] if isinstance(stop, str) else list(stop), **take(_STOPPING)),
        response=pb.ResponseOptions(token_ids=True, **take(_RESPONSE)),
        **take(_REQUEST),
    )
    if constraint := take(_CONSTRAINTS):
        request.structured_output.CopyFrom(pb.StructuredOutput(**constraint))
    if choice := options.get("choice"):
        request.structured_output.choice.values.extend(choice)
    _set_prompt(request, prompt)
    return request


def _set_prompt(request: pb.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = prompt
        return
    ids: list[int] = []
    messages: list[pb.ChatMessage] = []
    for item in prompt:
        if isinstance(item, Mapping):
            messages.append(pb.ChatMessage(role=item["role"], content=item["content"]))
        else:
            ids.append(item)
    if ids and messages:
        raise TypeError("a prompt is text, a list of token ids or a list of messages, not a mixture")
    if messages:
        request.messages.messages.extend(messages)
    else:
        request.token_ids.ids.extend(ids)
        request.token_ids.SetInParent()
