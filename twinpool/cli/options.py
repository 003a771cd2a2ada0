"""Options that several commands share, and how they become a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from twinpool.config_loader import Loaded, load
from twinpool.errors import ConfigError

if TYPE_CHECKING:
    from twinpool.client import Client

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

TlsCa: TypeAlias = Annotated[
    str | None, typer.Option("--tls-ca", help="Authority of the router's certificate; turns TLS on.")
]
TlsCert: TypeAlias = Annotated[str | None, typer.Option("--tls-cert", help="Own certificate, if the router asks.")]
TlsKey: TypeAlias = Annotated[str | None, typer.Option("--tls-key", help="Private key of --tls-cert.")]
Flags: TypeAlias = Mapping[str, tuple[str, object]]


def tls_flags(ca: str | None, cert: str | None, key: str | None) -> Flags:
    """The flags of a client's TLS for ``load_config``."""
    return {
        "client.tls_ca": ("--tls-ca", ca),
        "client.tls_cert": ("--tls-cert", cert),
        "client.tls_key": ("--tls-key", key),
    }


def load_config(file: Path | None, settings: list[str] | None = None, flags: Flags | None = None) -> Loaded:
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
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"--address {address} is no host:port; write for example 127.0.0.1:8100")
        return address
    router = loaded.config.router
    host = "127.0.0.1" if router.host in ("0.0.0.0", "::") else router.host
    return f"{host}:{router.grpc_port}"


def open_client(address: str | None, loaded: Loaded, max_retries: int = 3) -> Client:
    """A client of --address, else of the configured router."""
    from twinpool.client import Client
    from twinpool.tls import client_tls

    tls = client_tls(loaded.config) or False
    dialled = client_address(address, loaded)
    return Client(dialled, token=loaded.config.client.api_key, tls=tls, max_retries=max_retries)
