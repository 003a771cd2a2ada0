"""``twinpool config show`` and ``twinpool version``."""

from __future__ import annotations

from typing import Annotated

import typer

from twinpool.cli.options import ConfigFile, Json, Settings, load_config
from twinpool.cli.output import print_json


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    group = typer.Typer(help="The configuration.", no_args_is_help=True)
    group.command("show")(show)
    app.add_typer(group, name="config")
    app.command("version")(version)


def show(
    config: ConfigFile = None,
    settings: Settings = None,
    json: Json = False,
    describe_keys: Annotated[bool, typer.Option("--describe", help="Adds what each key means.")] = False,
) -> None:
    """Prints every key, its value and where the value came from."""
    from twinpool.config_loader import describe, to_text

    loaded = load_config(config, settings)
    if json:
        print_json({key: {"value": value, "source": source} for key, value, source in loaded.items()})
        return
    rows = [(key, to_text(value), source) for key, value, source in loaded.items()]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for key, text, source in rows:
        note = f"  # {describe(key)}" if describe_keys else ""
        print(f"{key:<{widths[0]}}  {text:<{widths[1]}}  {source}{note}")


def version(json: Json = False) -> None:
    """Prints the version."""
    from twinpool import __version__

    if json:
        print_json({"version": __version__})
    else:
        print(f"twinpool {__version__}")
