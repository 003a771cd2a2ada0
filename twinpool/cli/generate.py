"""``twinpool generate`` and ``twinpool chat``: a running deployment from the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from twinpool.cli.options import (
    Address,
    ConfigFile,
    Flags,
    Json,
    Settings,
    TlsCa,
    TlsCert,
    TlsKey,
    load_config,
    open_client,
    tls_flags,
)
from twinpool.cli.output import print_json, print_pairs, usage_pairs, write
from twinpool.errors import ConfigError

if TYPE_CHECKING:
    from twinpool.client import Client
    from twinpool.prompt import Message, Options, Prompt
    from twinpool.results import Completion

MaxTokens = Annotated[int | None, typer.Option("--max-tokens", "-n", help="Most tokens to generate.")]
Temperature = Annotated[float | None, typer.Option("--temperature", "-t", help="0 is greedy.", show_default="1")]
TopP = Annotated[float | None, typer.Option("--top-p")]
TopK = Annotated[int | None, typer.Option("--top-k")]
Seed = Annotated[int | None, typer.Option("--seed")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="Text that ends the answer; repeatable.")]
Timeout = Annotated[float | None, typer.Option("--timeout", help="Seconds for the whole request.")]
ModelName = Annotated[str | None, typer.Option("--model", "-m", help="Name of the model; the served one if left out.")]
Usage = Annotated[bool, typer.Option("--usage", "-u", help="Prints usage and timings after the answer.")]


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command("generate")(generate)
    app.command("chat")(chat)


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt as it stands; - reads standard input.")],
    address: Address = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    model: ModelName = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    stop: Stop = None,
    timeout: Timeout = None,
    usage: Usage = False,
    config: ConfigFile = None,
    settings: Settings = None,
    json: Json = False,
) -> None:
    """Continues a text; no chat template is applied."""
    options = _options(model, max_tokens, temperature, top_p, top_k, seed, stop, timeout)
    with _client(address, config, settings, tls_flags(tls_ca, tls_cert, tls_key)) as client:
        _answer(client, sys.stdin.read() if prompt == "-" else prompt, options, usage, json)


def chat(
    message: Annotated[str | None, typer.Argument(help="One question; without it a conversation starts.")] = None,
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    address: Address = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    model: ModelName = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    stop: Stop = None,
    timeout: Timeout = None,
    usage: Usage = False,
    config: ConfigFile = None,
    settings: Settings = None,
    json: Json = False,
) -> None:
    """Asks one question, or holds a conversation (ends with Ctrl-D)."""
    options = _options(model, max_tokens, temperature, top_p, top_k, seed, stop, timeout)
    turns: list[Message] = [{"role": "system", "content": system}] if system else []
    with _client(address, config, settings, tls_flags(tls_ca, tls_cert, tls_key)) as client:
        if message is not None:
            turns.append({"role": "user", "content": sys.stdin.read() if message == "-" else message})
            _answer(client, turns, options, usage, json)
            return
        while (line := _read_turn()) is not None:
            turns.append({"role": "user", "content": line})
            answer = _answer(client, turns, options, usage, json)
            turns.append({"role": "assistant", "content": answer.text})


def _read_turn() -> str | None:
    try:
        line = input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None
    return line if line.strip() else _read_turn()


def _client(address: str | None, config: ConfigFile, settings: Settings, flags: Flags) -> Client:
    return open_client(address, load_config(config, settings, flags))


def _options(
    model: str | None,
    max_tokens: int | None,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    seed: int | None,
    stop: list[str] | None,
    timeout: float | None,
) -> Options:
    for flag, value in (("--max-tokens", max_tokens), ("--top-k", top_k), ("--seed", seed)):
        if value is not None and value < 0:
            raise ConfigError(f"{flag} is {value}; give a number that is not negative")
    options: Options = {}
    if model is not None:
        options["model"] = model
    if max_tokens is not None:
        options["max_tokens"] = max_tokens
    if temperature is not None:
        options["temperature"] = temperature
    if top_p is not None:
        options["top_p"] = top_p
    if top_k is not None:
        options["top_k"] = top_k
    if seed is not None:
        options["seed"] = seed
    if stop:
        options["stop"] = stop
    if timeout is not None:
        options["timeout"] = timeout
    return options


def _answer(client: Client, prompt: Prompt, options: Options, usage: bool, json: bool) -> Completion:
    with client.stream(prompt, **options) as stream:
        for chunk in stream:
            if not json:
                write(chunk.text)
    if json:
        print_json(stream.result)
        return stream.result
    write("\n")
    if usage:
        print_pairs(usage_pairs(stream.result))
    return stream.result
