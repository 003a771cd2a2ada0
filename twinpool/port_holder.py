"""Which process listens on a port, as far as this user may know. Linux only; elsewhere nobody is found."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_LISTEN = "0A"


@dataclass(frozen=True, slots=True)
class PortHolder:
    """A process."""

    pid: int
    arguments: tuple[str, ...]

    @property
    def is_twinpool(self) -> bool:
        """Whether it was started as ``twinpool`` or ``python -m twinpool``."""
        return self._start is not None

    @property
    def command(self) -> str:
        """What it runs, in a few words."""
        if self._start is None:
            return " ".join(self.arguments)
        return " ".join(["twinpool", *self.arguments[self._start + 1 : self._start + 3]])

    @property
    def _start(self) -> int | None:
        names = [Path(argument).name for argument in self.arguments]
        return names.index("twinpool") if "twinpool" in names else None


def listener(port: int) -> PortHolder | None:
    """A process of this user that listens on TCP ``port``, on whatever address; None if there is none, or it hides."""
    wanted = {f"socket:[{inode}]" for inode in _listening(port)}
    for folder in _PROC.glob("[0-9]*") if wanted else ():
        with contextlib.suppress(OSError):  # another user's, or gone
            if any(_target(descriptor) in wanted for descriptor in (folder / "fd").iterdir()):
                arguments = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
                return PortHolder(int(folder.name), tuple(filter(None, arguments)))
    return None


def _listening(port: int) -> list[str]:
    """Inodes of the sockets that listen on ``port``."""
    found = []
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (_PROC / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                    found.append(fields[9])
    return found


def _target(descriptor: Path) -> str:
    try:
        return str(descriptor.readlink())
    except OSError:  # closed meanwhile
        return ""
