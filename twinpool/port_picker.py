"""Picks TCP ports for processes that are about to start.

Every port stays bound here until ``close``, so that no port is picked twice; the processes bind them right after.
"""

from __future__ import annotations

import socket

from twinpool.errors import ConfigError


class PortPicker:
    """Reserves ports; ``close`` frees them for the processes they were picked for."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def take(self, host: str, port: int, key: str, remedy: str) -> int:
        """Reserves ``host:port``, any free port if ``port`` is 0; returns the port.

        Raises:
            ConfigError: the port is in use or the host is not an address of this machine; the message names ``key``
                and ends with ``remedy``.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        self._sockets.append(listener)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host.strip("[]"), port))
            listener.listen(1)  # without it two sockets with SO_REUSEADDR share a port
        except OSError as error:
            cause = error.strerror or str(error)
            raise ConfigError(f"port {port} on {host} ({key}) cannot be used: {cause}; {remedy}") from error
        picked: int = listener.getsockname()[1]
        return picked

    def prefer(self, host: str, port: int, key: str, remedy: str) -> int:
        """Like ``take``, but any free port will do where ``port`` is in use.

        Raises:
            ConfigError: the host is not an address of this machine.
        """
        try:
            return self.take(host, port, key, remedy)
        except ConfigError:
            return self.take(host, 0, key, remedy)

    def close(self) -> None:
        """Frees all ports."""
        for listener in self._sockets:
            listener.close()
        self._sockets.clear()
