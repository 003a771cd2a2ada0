"""What the kernel knows of a process: its children, and the addresses on which it listens. Linux only."""

from __future__ import annotations

import contextlib
import ipaddress
from pathlib import Path


def children(pid: int) -> list[int]:
    """Child processes, of all threads."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def listening(pid: int) -> set[str]:
    """Addresses on which the process accepts TCP connections."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = str(descriptor.readlink())
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                raw = bytes.fromhex(fields[1].partition(":")[0])
                words = [raw[i : i + 4][::-1] for i in range(0, len(raw), 4)]
                address = ipaddress.ip_address(b"".join(words))
                found.add(str(getattr(address, "ipv4_mapped", None) or address))
    return found


def environment(pid: int) -> dict[str, str]:
    """The environment with which the process started; empty if it is gone or not ours."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(item.split("=", 1) for item in text.split("\0") if "=" in item)


def marked(variable: str, value: str) -> list[int]:
    """All live processes that were started with ``variable`` set to ``value``, whoever their parents are by now."""
    pids = [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdecimal()]
    return [pid for pid in pids if environment(pid).get(variable) == value and alive(pid)]


def command(pid: int) -> str:
    """The command line, or the title that the process gave itself; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def parent(pid: int) -> int:
    """The parent process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
