"""The ``twinpool`` command: collects the commands and turns errors into one line and an exit code.

Modules that need torch, gRPC or the model are imported by the commands that use them, so that ``--help`` is quick.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from twinpool.cli import admin, bench, config_show, doctor, generate, scale, serve, status, top, trace, up
from twinpool.cli.output import print_error
from twinpool.errors import TwinpoolError

app = typer.Typer(
    name="twinpool",
    help="Serves language models from a prefill pool and a decode pool.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
up.register(app)
serve.register(app)
generate.register(app)
status.register(app)
scale.register(app)
admin.register(app)
bench.register(app)
top.register(app)
trace.register(app)
config_show.register(app)
doctor.register(app)


_USAGE_ERROR: type[Any] = typer.BadParameter.__mro__[1]
"""click's UsageError, which typer has taken into itself in some versions."""


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Prints the version.")] = False,
) -> None:
    if version:
        config_show.version()
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)


def main() -> None:
    """Runs the command line; exits 0, 1 (it failed), 2 (usage or configuration) or 130 (interrupted)."""
    try:
        sys.exit(app(standalone_mode=False))
    except _USAGE_ERROR as error:
        sys.exit(_usage(error))
    except TwinpoolError as error:
        print_error(error.message)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except BrokenPipeError:  # `twinpool status | head`
        sys.stderr.close()
        sys.exit(1)


def _usage(error: Any) -> int:
    """Says on one line what is wrong; a command group without a command gets its help, which typer has printed."""
    message = error.format_message().strip()
    if message and "\n" not in message:
        command = error.ctx.command_path if error.ctx is not None else "twinpool"
        print_error(f"{message.rstrip('.')}; see {command} -h")
    return int(error.exit_code)
