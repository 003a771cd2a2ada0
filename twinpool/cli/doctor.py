"""``twinpool doctor``: what this machine offers and lacks, before anything is started."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from twinpool.cli.options import ConfigFile, Dtype, Json, Model, Settings, load_config
from twinpool.cli.output import print_json
from twinpool.errors import ConfigError

if TYPE_CHECKING:
    from twinpool.doctor import Finding

MARKS = {"ok": "ok  ", "warn": "WARN", "fail": "FAIL"}
ROLES = ("all", "router", "prefill", "decode")


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("doctor")(doctor)


def doctor(
    role: Annotated[
        str, typer.Argument(help="What is to run here: all (twinpool up), router, prefill or decode.")
    ] = "all",
    config: ConfigFile = None,
    settings: Settings = None,
    model: Model = None,
    dtype: Dtype = None,
    json: Json = False,
) -> None:
    """Checks versions, devices, memory, transports, ports and whether the model fits; exits 1 if something fails."""
    from twinpool.doctor import Finding, examine
    from twinpool.model_source import resolve_model
    from twinpool.progress import Progress

    if role not in ROLES:
        raise ConfigError(f"{role!r} is no role; give one of {', '.join(ROLES)}")
    loaded = load_config(config, settings, {"model.path": ("--model", model), "model.dtype": ("--dtype", dtype)}).config
    findings: list[Finding] = []
    folder = None
    try:
        folder = resolve_model(loaded.model, Progress())
    except ConfigError as error:
        findings.append(Finding("fail", "model", error.message))
    findings = [*examine(loaded, role, folder), *findings]  # type: ignore[arg-type]
    failed = any(finding.level == "fail" for finding in findings)
    if json:
        print_json({"ok": not failed, "findings": [asdict(finding) for finding in findings]})
    else:
        for finding in findings:
            remedy = f"; {finding.remedy}" if finding.remedy else ""
            print(f"{MARKS[finding.level]}  {finding.subject:<16}{finding.text}{remedy}")
        if failed:
            print("twinpool: something here keeps a deployment from working", file=sys.stderr)
    raise typer.Exit(1 if failed else 0)
