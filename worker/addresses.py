"""Checks of the addresses on which a process is about to listen, before it does anything that takes long."""

from __future__ import annotations

import socket

from twinpool.errors import ConfigError
from twinpool.kv_transfer.connectors.ucx import is_loopback


def check_port(host: str, port: int, key: str) -> None:
    """Fails early, before weights are read, if ``host:port`` cannot be bound.

    Raises:
        ConfigError: names the address and the setting ``key``.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}: {error.strerror}; stop the program that uses it or set {key}"
            ) from error


def check_closed(host: str, token: str | None, key: str) -> None:
    """A worker that others can reach serves only peers with the cluster token.

    Raises:
        ConfigError: ``host`` (setting ``key``) is not loopback and there is no token.
    """
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"{key} is {host}, which other machines can reach, but session.token is not set; "
            "set the same TWINPOOL_SESSION__TOKEN for routers and workers"
        )
