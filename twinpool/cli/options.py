"""Options that several commands share, and how they become a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from twinpool.config_loader import Loaded, load
from twinpool.errors import ConfigError

ConfigFile: TypeAlias = Annotated[
    Path | None, typer.Option("--config", "-c", help="YAML file; TWINPOOL_CONFIG does the same.", show_default=False)
]
Settings: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Any key of `twinpool config show`; repeatable.", show_default=False
    ),
]
Model: TypeAlias = Annotated[
    str | None, typer.Option("--model", "-m", help="demo, a Hugging Face folder, or a hub id.", show_default="demo")
]
Dtype: TypeAlias = Annotated[
    str | None, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.", show_default="auto")
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
Address: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--address", "-a", help="Router's gRPC host:port; default from the configuration.", show_default=False
    ),
]


def load_config(
    file: Path | None, settings: list[str] | None = None, flags: Mapping[str, tuple[str, object]] | None = None
) -> Loaded:
    """Loads the configuration from a command's options.

    Args:
        file: value of --config.
        settings: values of --set.
        flags: configuration key to (flag, its value); None values were not given.

    Raises:
        ConfigError: see ``config_loader.load``.
    """
    given: dict[str, tuple[str, str]] = {}
    for setting in settings or ():
        key, separator, text = setting.partition("=")
        if not separator:
            raise ConfigError(f"--set {setting}: a value is missing; write --set section.key=value")
        given[key.strip()] = (f"--set {key.strip()}", text)
    for key, (flag, value) in (flags or {}).items():
        if value is not None:
            given[key] = (flag, str(value))
    return load(file, given)


def client_address(address: str | None, loaded: Loaded) -> str:
    """Where clients dial: --address, else the configured router."""
    if address is not None:
        return address
    router = loaded.config.router
    host = "127.0.0.1" if router.host in ("0.0.0.0", "::") else router.host
    return f"{host}:{router.grpc_port}"
