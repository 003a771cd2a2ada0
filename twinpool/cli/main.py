"""The ``twinpool`` command: collects the commands and turns errors into one line and an exit code.

Modules that need torch, gRPC or the model are imported by the commands that use them, so that ``--help`` is quick.
"""

from __future__ import annotations

import sys

import typer

from twinpool.cli import bench, config_show, generate, scale, serve, status, up
from twinpool.cli.output import print_error
from twinpool.errors import TwinpoolError

app = typer.Typer(
    name="twinpool",
    help="Serves language models from a prefill pool and a decode pool.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
up.register(app)
serve.register(app)
generate.register(app)
status.register(app)
scale.register(app)
bench.register(app)
config_show.register(app)


def main() -> None:
    """Runs the command line; exits 0, 1 (it failed), 2 (usage or configuration) or 130 (interrupted)."""
    try:
        app()
    except TwinpoolError as error:
        print_error(error.message)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `twinpool status | head`
        sys.stderr.close()
        sys.exit(1)
