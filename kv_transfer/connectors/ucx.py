"""How UCX, under NIXL, may talk, and what it says about how it does. UCX authenticates nobody: where it listens
matters.

UCX reads its settings from the environment when an agent is made, and opens its log when its library is loaded. So both
are properties of the process: ``UcxSettings.apply`` is the only place that writes them, before the first agent, and
there is one ``ProtocolLog`` per process.
"""

from __future__ import annotations

import ctypes
import functools
import ipaddress
import os
import re
from dataclasses import dataclass

_LOG_FILE = "UCX_LOG_FILE"


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
        # A dead peer is an event for us, not an error worth a line on the console.
        os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
        os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")


class ProtocolLog:
    """The tables of chosen protocols (UCX_PROTO_INFO) that UCX writes when it connects; kept in anonymous memory."""

    def __init__(self) -> None:
        self._fd = -1

    def open(self) -> None:
        """Directs UCX's log to us, unless the user directs it elsewhere. Before UCX is loaded."""
        if _LOG_FILE in os.environ or self._fd >= 0:
            return
        self._fd = os.memfd_create("ucx-log", os.MFD_CLOEXEC)
        os.environ[_LOG_FILE] = f"/proc/self/fd/{self._fd}"
        os.environ["UCX_PROTO_INFO"] = "y"

    def opened(self) -> None:
        """UCX is loaded: takes the variable away again, because for child processes it would name another file."""
        if self._fd >= 0:
            os.environ.pop(_LOG_FILE, None)

    def transport(self, agent: str) -> str | None:
        """What remote reads of ``agent`` use: shm, tcp, rdma, cuda_ipc or UCX's own name for it; None if unknown."""
        if self._fd < 0:
            return None
        ctypes.CDLL(None).fflush(None)
        size = os.fstat(self._fd).st_size
        return read_transport(os.pread(self._fd, size, 0).decode(errors="replace"), agent)


@functools.cache
def protocol_log() -> ProtocolLog:
    """The log of this process."""
    return ProtocolLog()


def read_transport(log: str, agent: str) -> str | None:
    """Finds ``agent``'s last table "remote memory read ... into" in ``log`` and names the transport of its last row.

    Peers in the same process ("self") count too. The last row is the one for the largest messages.
    """
    found: str | None = None
    inside, ours = False, False
    for line in log.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 1:
            if " cfg#" in cells[0]:
                ours, inside = cells[0].startswith(f"{agent} "), False
            else:
                inside = ours and cells[0].startswith("remote memory read")
        elif len(cells) == 3 and inside and cells[0] != "Range":
            found = _transport_name(cells[2])
    return found


def _transport_name(config: str) -> str:
    """``cma/memory`` → shm, ``50% on rc_mlx5/mlx5_0:1 and ...`` → rdma."""
    names = set(re.findall(r"([a-z0-9_]+)/", config)) or {config}
    if any(name.startswith(("rc", "dc", "ud", "mlx", "srd", "ib", "gga")) for name in names):
        return "rdma"
    if any(name.startswith("cuda_ipc") or name.startswith("rocm_ipc") for name in names):
        return "cuda_ipc"
    if "tcp" in names:
        return "tcp"
    if names & {"cma", "posix", "sysv", "xpmem", "knem", "self", "memory"}:
        return "shm"
    return "+".join(sorted(names))


def is_loopback(host: str) -> bool:
    """Whether ``host`` is a loopback address or localhost."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
