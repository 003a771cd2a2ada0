"""How UCX, under NIXL, may talk. UCX authenticates nobody, so where it listens matters.

UCX reads its settings from the environment of the process when an agent is made, so they are the same for all agents
of a process. ``UcxSettings.apply`` is the only place that writes them.
"""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UcxSettings:
    """``tls`` None lets UCX choose its transports; ``net_devices`` None lets it use every interface."""

    tls: str | None = None
    net_devices: str | None = None

    @classmethod
    def for_host(cls, host: str, tls: str | None = None, net_devices: str | None = None) -> UcxSettings:
        """Settings of a worker that listens on ``host``: on a loopback address UCX stays on ``lo`` too."""
        if net_devices is None and is_loopback(host):
            net_devices = "lo"
        return cls(tls, net_devices)

    def apply(self) -> None:
        """Puts the settings into the environment; what is None leaves the user's own variable in force."""
        if self.tls is not None:
            os.environ["UCX_TLS"] = self.tls
        if self.net_devices is not None:
            os.environ["UCX_NET_DEVICES"] = self.net_devices
        os.environ.setdefault("UCX_LOG_LEVEL", "error")
        os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")


def is_loopback(host: str) -> bool:
    """Whether ``host`` is a loopback address or localhost."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
