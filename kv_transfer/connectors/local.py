"""KV between processes of one host, through memory that both map.

1. ``allocate`` makes an anonymous file (memfd; a temporary file where the system has none) of one header page and the
   region, and maps it. No name exists, so nothing is left behind, however the process ends: the kernel frees the memory
   with its last mapping.
2. ``metadata`` says how to open it (/proc/PID/fd/N) and carries a random boot nonce, which the header repeats.
3. A link maps it read-only and compares nonces, so that a restarted process under the same pid is never mistaken for
   the old one. The source's death is seen through a pidfd, its orderly end through the header's state.
4. Reads are memory copies on the reader's transfer thread, a bounded slice per ``poll``: nothing lands between polls,
   so ``close`` fences at once. The source does nothing (``pumped`` is false).

Only host memory. Linux needs both processes in one PID namespace, under one user.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import re
import secrets
import select
import struct
import sys
import tempfile
from collections import deque
from dataclasses import dataclass, field

import torch

from twinpool.kv_transfer.connectors.base import ConnectorError, Read, ReadState, Send, check_table
from twinpool.kv_transfer.copy_table import CopyTable

_HEADER = struct.Struct("<8s16sQ")
_MAGIC = b"twinpool"
_HEADER_BYTES = mmap.PAGESIZE
_OPEN, _CLOSED = 1, 2
SLICE_BYTES = 8 << 20
"""Bytes copied per poll: about a millisecond."""


class LocalConnector:
    """One rank's end; see the module."""

    def __init__(self, slice_bytes: int = SLICE_BYTES) -> None:
        self._slice_bytes = slice_bytes
        self._nonce = secrets.token_bytes(16)
        self._fd = -1
        self._path = ""
        self._map: mmap.mmap | None = None
        self._region: torch.Tensor | None = None
        self._links: list[LocalLink] = []

    @property
    def name(self) -> str:
        """Always local."""
        return "local"

    @property
    def pumped(self) -> bool:
        """Readers copy by themselves."""
        return False

    def allocate(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Allocates the region, zeroed; ConnectorError for anything but host memory."""
        if device.type != "cpu":
            raise ConnectorError(f"the local connector holds KV in host memory, not on {device}; use nixl on GPU")
        if self._region is not None:
            raise ConnectorError("the region is already allocated")
        if sys.platform == "linux":
            self._fd = os.memfd_create("twinpool-kv", os.MFD_CLOEXEC)
            self._path = f"/proc/{os.getpid()}/fd/{self._fd}"
        else:
            self._fd, self._path = tempfile.mkstemp(prefix="twinpool-kv-")
        os.ftruncate(self._fd, _HEADER_BYTES + num_bytes)
        self._map = mmap.mmap(self._fd, _HEADER_BYTES + num_bytes)
        self._write_state(_OPEN)
        self._region = torch.frombuffer(self._map, dtype=torch.uint8, offset=_HEADER_BYTES, count=num_bytes)
        return self._region

    def metadata(self) -> bytes:
        """JSON: path, pid, nonce, bytes."""
        if self._region is None:
            raise ConnectorError("metadata before allocate")
        return json.dumps(
            {"path": self._path, "pid": os.getpid(), "nonce": self._nonce.hex(), "bytes": self._region.numel()}
        ).encode()

    def connect(self, metadata: bytes, send: Send) -> LocalLink:
        """Maps the source's region; ConnectorError if it is gone, another one, or out of reach."""
        if self._region is None:
            raise ConnectorError("connect before allocate")
        link = LocalLink(metadata, self._region, self._slice_bytes)
        self._links = [other for other in self._links if not other.closed]
        self._links.append(link)
        return link

    def accept(self, peer: str, send: Send) -> None:
        """Nothing to do: readers need nothing from us."""

    def deliver(self, peer: str, payload: bytes) -> None:
        """Refused: links of this connector send nothing."""
        raise ConnectorError("the local connector takes no payloads")

    def dismiss(self, peer: str) -> None:
        """Nothing to do: the reader's mapping ends with the reader."""

    def progress(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Tells readers, ends our links and drops our mapping. The memory goes when the last user of it does."""
        for link in self._links:
            link.close()
        self._links.clear()
        if self._map is None:
            return
        self._write_state(_CLOSED)
        self._region = None
        with contextlib.suppress(BufferError):
            # Tensors made from the region may still live; then the mapping goes with the last of them.
            self._map.close()
        self._map = None
        os.close(self._fd)
        if sys.platform != "linux":
            os.unlink(self._path)

    def _write_state(self, state: int) -> None:
        assert self._map is not None
        _HEADER.pack_into(self._map, 0, _MAGIC, self._nonce, state)


@dataclass(slots=True)
class LocalRead:
    """A read in slices; ``left`` are the ranges, or parts of them, not yet copied: (source, target, length)."""

    num_bytes: int
    left: deque[tuple[int, int, int]] = field(default_factory=deque)
    state: ReadState = ReadState.PENDING


class LocalLink:
    """A read-only mapping of one source's region."""

    def __init__(self, metadata: bytes, region: torch.Tensor, slice_bytes: int) -> None:
        try:
            info = json.loads(metadata)
            self._nonce = bytes.fromhex(info["nonce"])
            self._source_bytes = int(info["bytes"])
            self._pid = int(info["pid"])
            path = str(info["path"])
            if sys.platform == "linux" and not re.fullmatch(r"/proc/\d+/fd/\d+", path):
                raise ValueError(f"{path} is no descriptor of a process")
        except (ValueError, KeyError, TypeError) as error:
            raise ConnectorError(f"not metadata of a local connector ({error}); use one connector on both") from error
        self._region = region
        self._slice_bytes = slice_bytes
        self._process = _Process(self._pid)
        self._closed = False
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                # Writable only because torch and ctypes want a writable buffer; nothing here writes into it.
                self._map = mmap.mmap(fd, _HEADER_BYTES + self._source_bytes)
            finally:
                os.close(fd)
        except (OSError, ValueError) as error:
            self._process.close()
            raise ConnectorError(
                f"cannot map the KV region of process {self._pid} ({error}); the local connector needs both workers "
                "on one host, in one PID namespace, under one user, and the source alive; use nixl across hosts"
            ) from error
        anchor = ctypes.c_char.from_buffer(self._map)
        self._source_address = ctypes.addressof(anchor) + _HEADER_BYTES
        del anchor
        if not self._alive():
            self.close()
            raise ConnectorError(f"process {self._pid} no longer holds the region it published; connect to the new one")

    @property
    def transport(self) -> str:
        """Always local/shm."""
        return "local/shm"

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def read(self, table: CopyTable) -> LocalRead:
        """Starts a read; nothing is copied before ``poll``."""
        check_table(table, self._source_bytes, self._region.numel())
        if self._closed or not self._alive():
            raise ConnectorError(f"the source (process {self._pid}) is gone")
        return LocalRead(table.num_bytes, deque(table))

    def poll(self, read: Read) -> ReadState:
        """Copies the next slice. FAILED if the source died meanwhile: its memory may not be what was announced."""
        assert isinstance(read, LocalRead)
        if read.state is not ReadState.PENDING:
            return read.state
        if self._closed or not self._alive():
            read.left.clear()
            read.state = ReadState.FAILED
            return read.state
        budget = self._slice_bytes
        target_address = self._region.data_ptr()
        while read.left and budget > 0:
            source, target, left = read.left.popleft()
            length = min(left, budget)
            ctypes.memmove(target_address + target, self._source_address + source, length)
            budget -= length
            if length < left:
                read.left.appendleft((source + length, target + length, left - length))
        if not read.left:
            read.state = ReadState.DONE if self._alive() else ReadState.FAILED
        return read.state

    def deliver(self, payload: bytes) -> None:
        """Refused: the source sends nothing."""
        raise ConnectorError("the local connector takes no payloads")

    def close(self) -> None:
        """Unmaps the source; copies happen only in ``poll``, so nothing lands after this."""
        if self._closed:
            return
        self._closed = True
        self._map.close()
        self._process.close()

    def _alive(self) -> bool:
        if not self._process.alive():
            return False
        magic, nonce, state = _HEADER.unpack_from(self._map, 0)
        return (magic, nonce, state) == (_MAGIC, self._nonce, _OPEN)


class _Process:
    """Tells whether a process still lives, without being fooled by a reused pid (where pidfds exist)."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._fd = -1
        self._poll: select.poll | None = None
        self._gone = False
        try:
            if sys.platform == "linux":
                self._fd = os.pidfd_open(pid)
                self._poll = select.poll()
                self._poll.register(self._fd, select.POLLIN)
            else:
                os.kill(pid, 0)
        except ProcessLookupError:
            self._gone = True

    def alive(self) -> bool:
        """Whether it has not ended (a zombie has)."""
        if self._gone:
            return False
        if self._poll is not None:
            self._gone = bool(self._poll.poll(0))
        else:
            try:
                os.kill(self._pid, 0)
            except ProcessLookupError:
                self._gone = True
        return not self._gone

    def close(self) -> None:
        """Closes the descriptor. Idempotent."""
        self._gone = True
        self._poll = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
