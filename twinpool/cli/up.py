"""``twinpool up`` and ``twinpool demo``: a whole deployment on this machine."""

from __future__ import annotations

import asyncio
import itertools
import shlex
import shutil
import signal
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from twinpool.cli.options import ConfigFile, Dtype, Json, Model, Settings, load_config
from twinpool.cli.output import print_json, print_pairs, usage_pairs, write

if TYPE_CHECKING:
    from twinpool.config import Config
    from twinpool.launcher import Deployment, Plan

QUESTION = "What is the capital of France?"
_COLOURS = (36, 32, 35, 34, 33, 31)


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command("up")(up)
    app.command("demo")(demo)


def up(
    config: ConfigFile = None,
    settings: Settings = None,
    model: Model = None,
    dtype: Dtype = None,
    http_port: Annotated[int | None, typer.Option("--http-port", help="0 picks one.", show_default="8000")] = None,
    grpc_port: Annotated[int | None, typer.Option("--grpc-port", help="0 picks one.", show_default="8100")] = None,
    launcher: Annotated[
        str | None, typer.Option("--launcher", help="Workers here (local), or on a Ray cluster.", show_default="local")
    ] = None,
    ray_address: Annotated[
        str | None, typer.Option("--ray-address", help="host:port of the Ray cluster.", show_default=False)
    ] = None,
    controller_port: Annotated[
        int | None, typer.Option("--controller-port", help="For `twinpool scale`; 0 picks one.", show_default="8200")
    ] = None,
    disaggregate: Annotated[
        str | None, typer.Option("--disaggregate", help="always, auto or never.", show_default="auto")
    ] = None,
    prefill_replicas: Annotated[int | None, typer.Option("--prefill-replicas", show_default="1")] = None,
    decode_replicas: Annotated[int | None, typer.Option("--decode-replicas", show_default="1")] = None,
    max_model_len: Annotated[int | None, typer.Option("--max-model-len", help="Longest prompt plus answer.")] = None,
    connector: Annotated[str | None, typer.Option("--connector", help="How KV travels.", show_default="auto")] = None,
    json: Json = False,
) -> None:
    """Starts a router, a prefill pool and a decode pool, and keeps them running until Ctrl-C."""
    flags = {
        "model.path": ("--model", model),
        "model.dtype": ("--dtype", dtype),
        "router.http_port": ("--http-port", http_port),
        "router.grpc_port": ("--grpc-port", grpc_port),
        "controller.port": ("--controller-port", controller_port),
        "controller.launcher": ("--launcher", launcher),
        "ray.address": ("--ray-address", ray_address),
        "router.disaggregate": ("--disaggregate", disaggregate),
        "prefill.replicas": ("--prefill-replicas", prefill_replicas),
        "decode.replicas": ("--decode-replicas", decode_replicas),
        "model.max_model_len": ("--max-model-len", max_model_len),
        "transport.connector": ("--connector", connector),
    }
    loaded = load_config(config, settings, flags)
    asyncio.run(_until_signal(_up(_prepare(loaded.config), json)))


def demo(
    question: Annotated[str, typer.Argument(help="What to ask.")] = QUESTION,
    config: ConfigFile = None,
    settings: Settings = None,
    model: Model = None,
    dtype: Dtype = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n")] = 32,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Shows the processes' logs.")] = False,
    json: Json = False,
) -> None:
    """Starts a deployment on free ports, asks one question through both pools, prints the proof, stops everything."""
    flags = {
        "model.path": ("--model", model),
        "model.dtype": ("--dtype", dtype),
        "router.disaggregate": ("demo", "always"),
        "router.http_port": ("demo", 0),
        "router.grpc_port": ("demo", 0),
    }
    plan = _prepare(load_config(config, settings, flags).config)
    if not asyncio.run(_until_signal(_demo(plan, question, max_tokens, verbose, json))):
        raise typer.Exit(130)


def _prepare(config: Config) -> Plan:
    from twinpool.launcher import prepare
    from twinpool.progress import Progress

    return prepare(config, Progress())


async def _up(plan: Plan, json: bool) -> None:
    from twinpool.launcher import deployment

    async with deployment(plan, _LogPrinter([spec.name for spec in plan.specs]), _note) as started:
        if json:
            found = {"grpc": started.grpc_address, "http": started.http_url, "controller": started.controller_address}
            found["admin"] = started.admin_address
            print_json({**found, "ready_s": round(started.ready_s, 3)})
        else:
            print(_welcome(started))
        sys.stdout.flush()
        await started.supervisor.failure()


async def _demo(plan: Plan, question: str, max_tokens: int, verbose: bool, json: bool) -> None:
    from twinpool.async_client import AsyncClient
    from twinpool.launcher import deployment
    from twinpool.prompt import Message
    from twinpool.tls import client_tls

    def client(started: Deployment) -> AsyncClient:
        tls = client_tls(plan.config) or False
        return AsyncClient(started.grpc_address, token=plan.config.client.api_key, tls=tls, timeout=120)

    news = _News()
    log = _LogPrinter([spec.name for spec in plan.specs]) if verbose else news
    _note(f"Starting {_pools(plan.config)}")
    waiting = asyncio.create_task(news.show())
    async with deployment(plan, log, _note) as started:
        waiting.cancel()
        _note(f"Ready after {started.ready_s:.1f} s")
        async with client(started) as asking:
            if not json:
                write(f"\nQuestion  {question}\nAnswer    ")
            async with asking.stream(
                [Message(role="user", content=question)], temperature=0, max_tokens=max_tokens
            ) as stream:
                async for chunk in stream:
                    if not json:
                        write(chunk.text)
            if not json:
                write("\n")
            status = await asking.status()
    if json:
        print_json(stream.result)
        return
    write("\n")
    print_pairs(usage_pairs(stream.result))
    for worker in status.workers:
        for link in worker.links:
            measured = f"{link.transport}, {link.gigabytes_per_second:.2f} GB/s in the warm-up read"
            print_pairs({f"link {link.prefill_worker} -> {worker.worker_id}": measured})
    write("\n")
    _note("All processes have stopped")


async def _until_signal(work: Coroutine[None, None, None]) -> bool:
    """Runs ``work`` and cancels it on SIGINT or SIGTERM; a second signal cuts its cleaning up short.

    Returns whether ``work`` ended by itself.
    """
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        _note("Draining; once more stops at once")
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)
    try:
        await task
    except asyncio.CancelledError:
        return False
    return True


class _LogPrinter:
    """Prints the children's lines behind their names, in colours on a terminal."""

    def __init__(self, names: Sequence[str]) -> None:
        self._width = max(map(len, names))
        self._colours = dict(zip(names, itertools.cycle(_COLOURS), strict=False)) if sys.stderr.isatty() else {}

    def __call__(self, name: str, line: str) -> None:
        prefix = f"{name:<{self._width}} |"
        if name in self._colours:
            prefix = f"\033[{self._colours[name]}m{prefix}\033[0m"
        print(f"{prefix} {line}", file=sys.stderr, flush=True)


class _News:
    """Takes the processes' lines and shows the newest one while a start takes long, for example at the first one."""

    EVERY_S = 5.0

    def __init__(self) -> None:
        self._newest = ""

    def __call__(self, name: str, line: str) -> None:
        self._newest = f"{name}: {line.rstrip()}"

    async def show(self) -> None:
        """Goes on until cancelled."""
        shown = ""
        while True:
            await asyncio.sleep(self.EVERY_S)
            if self._newest != shown:
                shown = self._newest
                _note(f"Still starting; {shown}")


def _note(text: str) -> None:
    print(f"twinpool: {text}", file=sys.stderr, flush=True)


def _pools(config: Config) -> str:
    def workers(role: str, count: int) -> str:
        return f"{count} {role} worker{'' if count == 1 else 's'}"

    pools = f"{workers('prefill', config.prefill.replicas)}, {workers('decode', config.decode.replicas)}"
    return f"{config.model.name}: 1 router, {pools}"


def _welcome(started: Deployment) -> str:
    name = started.config.model.name
    body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "{QUESTION}"}}], "temperature": 0}}'
    config = started.config
    header = ' -H "Authorization: Bearer $TWINPOOL_CLIENT__API_KEY"' if config.client.api_key else ""
    trust = f" --cacert {shlex.quote(config.client.tls_ca or config.tls.ca or '')}" if config.tls.is_public else ""
    arguments = "".join(
        [
            ", token=os.environ['TWINPOOL_CLIENT__API_KEY']" if config.client.api_key else "",
            f", tls=twinpool.ClientTls({config.client.tls_ca or config.tls.ca!r})" if config.tls.is_public else "",
        ]
    )
    imports = "os, twinpool" if config.client.api_key else "twinpool"
    client = f"twinpool.Client('{started.grpc_address}'{arguments})"
    code = f"import {imports}; print({client}.chat('{QUESTION}', temperature=0).text)"
    return f"""
Ready after {started.ready_s:.1f} s: {_pools(started.config)}
  gRPC  {started.grpc_address}
  HTTP  {started.http_url}/v1

Ask it:
  curl -s{trust} {started.http_url}/v1/chat/completions{header} -H "Content-Type: application/json" \\
    -d {shlex.quote(body)}
  {shlex.quote(sys.executable)} -c "{code}"
  {_command()} chat --address {started.grpc_address} --temperature 0 {shlex.quote(QUESTION)}
  {_command()} status --address {started.grpc_address}

Another size:
  {_command()} scale decode 2 --address {started.controller_address}

Ctrl-C drains and stops it."""


def _command() -> str:
    """How this program is called from the user's shell."""
    own = Path(sys.executable).with_name("twinpool")
    on_path = shutil.which("twinpool")
    if on_path is not None and Path(on_path) == own:
        return "twinpool"
    return shlex.quote(str(own)) if own.is_file() else f"{shlex.quote(sys.executable)} -m twinpool"
