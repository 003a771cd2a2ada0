"""``twinpool up`` as a user runs it, and ``twinpool scale`` beside it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

TWINPOOL = [sys.executable, "-P", "-m", "twinpool"]
SETTINGS = {
    "router.disaggregate": "always",
    "decode.drain_timeout_s": "0.5",
    "prefill.drain_timeout_s": "0.5",
    "router.drain_timeout_s": "1",
}
LIMIT_S = 240
"""For what takes seconds on an idle machine."""


async def twinpool(*arguments: str, environment: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """Runs a command; returns its exit code, output and errors."""
    process = await asyncio.create_subprocess_exec(
        *TWINPOOL, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environment
    )
    async with asyncio.timeout(LIMIT_S):
        output, errors = await process.communicate()
    return process.returncode or 0, output.decode(), errors.decode()


@contextlib.asynccontextmanager
async def up(
    model: Path, folder: Path, settings: Mapping[str, str], environment: Mapping[str, str] | None = None
) -> AsyncIterator[tuple[dict[str, Any], asyncio.subprocess.Process]]:
    """A deployment: what ``twinpool up --json`` says, and its process. Prints the log at the end."""
    words = [word for key, value in (SETTINGS | dict(settings)).items() for word in ("--set", f"{key}={value}")]
    ports = ["--grpc-port", "0", "--http-port", "0", "--json"]
    with (folder / "up.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *TWINPOOL,
            "up",
            "--model",
            str(model),
            *ports,
            *words,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env=environment,
        )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(LIMIT_S):
            text = await process.stdout.readuntil(b"}\n")
        yield json.loads(text), process
    finally:
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(LIMIT_S):
            await process.wait()
        print((folder / "up.log").read_text(errors="replace"))
