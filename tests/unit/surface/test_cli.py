"""The command as users run it: exit codes, one-line errors, JSON, and how little it imports."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.unit.surface.conftest import ScriptedRouter

TWINPOOL = [sys.executable, "-P", "-m", "twinpool"]


def twinpool(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([*TWINPOOL, *arguments], input=stdin, capture_output=True, text=True, timeout=60, check=False)


async def with_router(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(twinpool, *arguments, stdin=stdin)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["up", "--model", "/no/such/folder"], ["/no/such/folder does not exist", "--model"]),
        (["serve", "prefill", "--model", "/no/such/folder"], ["/no/such/folder does not exist"]),
        (["up", "--set", "router.htp_port=1"], ["router.htp_port", "did you mean router.http_port?"]),
        (["up", "--set", "router.http_port"], ["a value is missing"]),
        (["up", "--decode-replicas", "0"], ["decode.replicas is 0"]),
        (["up", "--disaggregate", "always", "--prefill-replicas", "0"], ["prefill.replicas is 0"]),
        (["up", "--disaggregate", "maybe"], ["--disaggregate", "'always', 'auto' or 'never'"]),
        (["chat", "hi", "--max-tokens", "-1"], ["--max-tokens is -1"]),
    ],
)
def test_configuration_errors_are_one_line_and_exit_2(arguments: list[str], parts: list[str]) -> None:
    done = twinpool(*arguments)
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    for part in parts:
        assert part in lines[0]


def test_port_in_use_names_port_and_flag() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        done = twinpool("up", "--http-port", port)
    assert done.returncode == 2
    assert f"port {port} on 127.0.0.1 (router.http_port)" in done.stderr
    assert "--http-port" in done.stderr


def test_folder_without_weights_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    done = twinpool("up", "--model", str(tmp_path), "--http-port", "0", "--grpc-port", "0")
    assert done.returncode == 2
    assert "lacks tokenizer.json and *.safetensors" in done.stderr


def test_no_router_is_one_line_and_exit_1() -> None:
    done = twinpool("status", "--address", "127.0.0.1:1")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "error: no router answers at 127.0.0.1:1; start one (twinpool up) or give its address (--address)"
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["up", "--no-such-flag"], "No such option: --no-such-flag"),
        (["no-such-command"], "No such command 'no-such-command'"),
        (["generate"], "Missing argument"),
        (["generate", "x", "-a", "nonsense"], "--address nonsense is no host:port"),
    ],
)
def test_usage_errors_are_one_line_and_exit_2(arguments: list[str], said: str) -> None:
    done = twinpool(*arguments)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"error: {said}")


def test_help_and_version() -> None:
    assert twinpool("--version").stdout.startswith("twinpool 0")
    assert "Serves language models" in twinpool().stdout
    assert "router" in twinpool("serve").stdout


def test_config_show() -> None:
    done = twinpool("config", "show", "--json", "--set", "decode.replicas=3")
    shown = json.loads(done.stdout)
    assert shown["decode.replicas"] == {"value": 3, "source": "--set decode.replicas"}
    assert shown["prefill.replicas"] == {"value": 1, "source": "default"}
    line = next(line for line in twinpool("config", "show").stdout.splitlines() if line.startswith("router.workers"))
    assert line.split() == ["router.workers", "default"]


async def test_generate_chat_and_status(router: ScriptedRouter) -> None:
    at = ("--address", router.address)
    done = await with_router("generate", "Once upon", "--max-tokens", "7", "--temperature", "0", "--usage", *at)
    assert done.returncode == 0
    assert done.stdout.splitlines()[0] == "The end."
    assert "2 remote" in done.stdout
    assert router.requests[0].text == "Once upon"
    assert router.requests[0].stopping.max_tokens == 7

    result = json.loads((await with_router("chat", "Who?", "--system", "Be brief.", "--json", *at)).stdout)
    assert result["choices"][0]["text"] == "The end."
    assert [turn.role for turn in router.requests[1].messages.messages] == ["system", "user"]

    done = await with_router("chat", *at, stdin="one\n\ntwo\n")
    assert done.stdout == "The end.\nThe end.\n"
    turns = [(turn.role, turn.content) for turn in router.requests[3].messages.messages]
    assert turns == [("user", "one"), ("assistant", "The end."), ("user", "two")]

    assert "nixl/shm at 2.50 GB/s" in (await with_router("status", *at)).stdout
    assert json.loads((await with_router("status", "--json", *at)).stdout)["models"][0]["id"] == "tiny"


def test_client_commands_import_no_torch() -> None:
    code = (
        "import sys; sys.argv = ['twinpool', 'status', '--address', '127.0.0.1:1']\n"
        "from twinpool.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print([name for name in ('torch', 'numpy', 'transformers', 'fastapi') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_imports_neither_grpc_services_nor_launcher() -> None:
    code = (
        "import sys; sys.argv = ['twinpool', '--help']\n"
        "from twinpool.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print([name for name in ('google.protobuf', 'twinpool.launcher', 'huggingface_hub') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
