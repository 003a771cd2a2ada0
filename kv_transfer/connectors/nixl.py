"""KV through NIXL over UCX: RDMA, TCP, shared memory, NVLink.

1. The source has one agent, which registers the region. Its progress thread is off, because that spins a core: reads by
   others advance only in ``progress()`` (``pumped`` is true), and by themselves where the transport is one-sided.
2. A reader makes one agent per link, so that a hung peer can be fenced by destroying that agent alone (1 to 5 ms). Only
   that stops a read: releasing the handle of a posted read, or removing the remote agent, does not (64 MB landed
   later). So a handle is released only after its read has ended, and those in progress are left to die with the agent.
   For that we hold raw handles: nixl's wrapper objects release theirs when they are collected.
3. Reads are posted in slices, because a shared-memory copy runs inside the post: at most ``SLICE_BYTES`` per request
   and ``POST_BUDGET_S`` per poll, at most ``MAX_IN_FLIGHT`` requests.
4. A dead peer makes a post or a poll raise; the read has FAILED once all its requests have ended.

Descriptors are made per request: 256 take 0.06 ms, and the planner has merged neighbours, so lists prepared per block
would not pay.
"""

from __future__ import annotations

import itertools
import secrets
import struct
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import nixl._api as nixl_api
import nixl._bindings as bindings
import numpy as np
import torch

from twinpool.kv_transfer.connectors.base import ConnectorError, CopyRange, Read, ReadState, Send, check_ranges
from twinpool.kv_transfer.connectors.region import zeroed_region
from twinpool.kv_transfer.connectors.slices import slice_ranges
from twinpool.kv_transfer.connectors.ucx import ProtocolLog, UcxSettings, protocol_log

SLICE_BYTES = 16 << 20
SLICE_RANGES = 1024
POST_BUDGET_S = 0.004
MAX_IN_FLIGHT = 4

_HEADER = struct.Struct("<8sQQQB")
_MAGIC = b"twinnixl"

NIXL_ERRORS: tuple[type[Exception], ...] = (
    bindings.nixlBackendError,
    bindings.nixlCancelledError,
    bindings.nixlInvalidParamError,
    bindings.nixlMismatchError,
    bindings.nixlNotAllowedError,
    bindings.nixlNotFoundError,
    bindings.nixlNotPostedError,
    bindings.nixlNotSupportedError,
    bindings.nixlRemoteDisconnectError,
    bindings.nixlRepostActiveError,
    bindings.nixlUnknownError,
)
"""Everything that nixl raises; it has no common base."""

START_ERRORS: tuple[type[Exception], ...] = (*NIXL_ERRORS, RuntimeError)
"""What making an agent raises."""


@dataclass(frozen=True, slots=True)
class _Memory:
    """A registered region, as descriptors want it. ``vram`` tells the memory type."""

    address: int
    num_bytes: int
    device: int
    vram: bool

    @classmethod
    def of(cls, region: torch.Tensor) -> _Memory:
        vram = region.device.type != "cpu"
        return cls(region.data_ptr(), region.numel(), region.get_device() if vram else 0, vram)

    @property
    def mem_type(self) -> str:
        return "VRAM" if self.vram else "DRAM"

    @property
    def segment(self) -> Any:
        return bindings.VRAM_SEG if self.vram else bindings.DRAM_SEG

    def register(self, agent: Any) -> None:
        """Registers the region with ``agent``; undone when the agent is destroyed."""
        agent.register_memory([(self.address, self.num_bytes, self.device, "")], self.mem_type)


class NixlConnector:
    """One rank's end; see the module."""

    def __init__(self, ucx: UcxSettings) -> None:
        ucx.apply()
        self._log = protocol_log()
        self._log.open()
        self._prefix = f"tp{secrets.token_hex(6)}"
        self._numbers = itertools.count()
        self._agent: Any = self._make_agent()
        self._log.opened()
        self._region: torch.Tensor | None = None
        self._links: list[NixlLink] = []

    @property
    def name(self) -> str:
        """Always nixl."""
        return "nixl"

    @property
    def pumped(self) -> bool:
        """Reads over TCP, and connecting over anything, need the source."""
        return True

    def allocate(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Allocates the region, zeroed, and registers it. Raises ConnectorError if UCX cannot register it."""
        if self._region is not None:
            raise ConnectorError("the region is already allocated")
        region = zeroed_region(num_bytes, device)
        try:
            _Memory.of(region).register(self._agent)
        except NIXL_ERRORS as error:
            raise ConnectorError(
                f"NIXL cannot register {num_bytes} bytes on {device} ({error}); raise the limit of locked memory "
                "(ulimit -l), or allow the memory type in transport.ucx_tls (cuda_copy)"
            ) from error
        self._region = region
        return region

    def metadata(self) -> bytes:
        """Address, size and device of the region, and NIXL's own metadata."""
        memory = _Memory.of(self._allocated())
        header = _HEADER.pack(_MAGIC, memory.address, memory.num_bytes, memory.device, memory.vram)
        agent_metadata: bytes = self._agent.get_agent_metadata()
        return header + agent_metadata

    def connect(self, metadata: bytes, send: Send) -> NixlLink:
        """Makes an agent for the source that published ``metadata``; the handshake itself runs in the first read."""
        region = self._allocated()
        if len(metadata) <= _HEADER.size or not metadata.startswith(_MAGIC):
            raise ConnectorError("not metadata of a nixl connector; use one connector in both pools")
        _, address, num_bytes, device, vram = _HEADER.unpack_from(metadata)
        agent = self._make_agent()
        try:
            _Memory.of(region).register(agent)
            remote = agent.add_remote_agent(metadata[_HEADER.size :])
        except NIXL_ERRORS as error:
            raise ConnectorError(
                f"NIXL cannot connect to the source ({error}); check that transport.ucx_tls and "
                "transport.ucx_net_devices reach it, and that it still runs"
            ) from error
        name = remote.decode() if isinstance(remote, bytes) else remote
        link = NixlLink(agent, name, _Memory.of(region), _Memory(address, num_bytes, device, bool(vram)), self._log)
        self._links = [other for other in self._links if not other.closed]
        self._links.append(link)
        return link

    def accept(self, peer: str, send: Send) -> None:
        """Nothing to do: the reader connects."""

    def deliver(self, peer: str, payload: bytes) -> None:
        """Refused: links of this connector send nothing."""
        raise ConnectorError("the nixl connector takes no payloads")

    def dismiss(self, peer: str) -> None:
        """Nothing to do: UCX notices that the reader's endpoint is gone."""

    def progress(self) -> None:
        """Runs UCX's progress once."""
        if self._agent is not None:
            self._agent.agent.getNotifs({}, [])

    def close(self) -> None:
        """Destroys all agents."""
        for link in self._links:
            link.close()
        self._links.clear()
        self._agent = None
        self._region = None

    def _allocated(self) -> torch.Tensor:
        if self._region is None:
            raise ConnectorError("the region is not allocated yet")
        return self._region

    def _make_agent(self) -> Any:
        config = nixl_api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        try:
            agent = nixl_api.nixl_agent(f"{self._prefix}-{next(self._numbers)}", config)
        except START_ERRORS as error:
            raise ConnectorError(
                f"NIXL cannot start UCX ({error}); check transport.ucx_tls and transport.ucx_net_devices"
            ) from error
        if "UCX" not in agent.backends:
            raise ConnectorError("NIXL has no UCX plugin; reinstall nixl, or use the local connector")
        return agent


def source_address(metadata: bytes) -> tuple[int, bytes]:
    """The address of a source's region, and NIXL's own metadata, out of ``NixlConnector.metadata``."""
    return _HEADER.unpack_from(metadata)[1], metadata[_HEADER.size :]


@dataclass(slots=True)
class NixlRead:
    """A read in slices: those ``left`` to post, and the raw handles of those in flight."""

    num_bytes: int
    left: deque[list[CopyRange]] = field(default_factory=deque)
    handles: list[int] = field(default_factory=list)
    failed: bool = False
    state: ReadState = ReadState.PENDING


class NixlLink:
    """A reader's agent for one source; see the module."""

    def __init__(self, agent: Any, remote: str, region: _Memory, source: _Memory, log: ProtocolLog) -> None:
        self._agent: Any = agent
        self._name: str = agent.name
        self._remote = remote
        self._region = region
        self._source = source
        self._log = log
        self._transport: str | None = None

    @property
    def transport(self) -> str:
        """nixl/ and what UCX says it uses for reads; known once the first read is done, until then nixl/ucx."""
        if self._transport is None:
            self._transport = self._log.transport(self._name)
        return f"nixl/{self._transport or 'ucx'}"

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._agent is None

    def read(self, ranges: Sequence[CopyRange]) -> NixlRead:
        """Posts the first slice. Raises ConnectorError if the peer is gone."""
        num_bytes = check_ranges(ranges, self._source.num_bytes, self._region.num_bytes)
        if self._agent is None:
            raise ConnectorError("the link is closed")
        fits = num_bytes <= SLICE_BYTES and len(ranges) <= SLICE_RANGES
        read = NixlRead(num_bytes, deque([list(ranges)] if fits else slice_ranges(ranges, SLICE_BYTES, SLICE_RANGES)))
        try:
            self._post(read)
        except NIXL_ERRORS as error:
            raise ConnectorError(f"the source {self._remote} is gone ({error})") from error
        return read

    def poll(self, read: Read) -> ReadState:
        """Progresses UCX, posts more slices, and tells the state."""
        assert isinstance(read, NixlRead)
        if read.state is not ReadState.PENDING:
            return read.state
        if self._agent is None:
            read.state = ReadState.FAILED
            return read.state
        agent = self._agent.agent
        for handle in list(read.handles):
            try:
                if agent.getXferStatus(handle) == bindings.NIXL_IN_PROG:
                    continue
            except NIXL_ERRORS:
                read.failed = True
            read.handles.remove(handle)
            agent.releaseXferReq(handle)
        budget_ends = time.perf_counter() + POST_BUDGET_S
        while read.left and not read.failed and len(read.handles) < MAX_IN_FLIGHT:
            try:
                self._post(read)
            except NIXL_ERRORS:
                read.failed = True
            if time.perf_counter() > budget_ends:
                break
        if read.failed:
            read.left.clear()
        if not read.handles and not read.left:
            read.state = ReadState.FAILED if read.failed else ReadState.DONE
        return read.state

    def deliver(self, payload: bytes) -> None:
        """Refused: the source sends nothing."""
        raise ConnectorError("the nixl connector takes no payloads")

    def close(self) -> None:
        """Destroys the agent, and with it every read in flight."""
        # The last reference: the C++ agent dies here. Handles in flight are not released, see the module.
        self._agent = None

    def _post(self, read: NixlRead) -> None:
        """Posts the next slice; raises one of NIXL_ERRORS, after which nothing of this slice can land."""
        agent = self._agent.agent
        part = read.left.popleft()
        # From a flat iterator: four times quicker than from tuples, which counts in reads of a megabyte.
        flat = np.fromiter(itertools.chain.from_iterable(part), dtype=np.uint64, count=3 * len(part))
        table = flat.reshape(len(part), 3)
        handle = agent.createXferReq(
            bindings.NIXL_READ,
            self._descriptors(self._region, table[:, 1], table[:, 2]),
            self._descriptors(self._source, table[:, 0], table[:, 2]),
            self._remote,
            b"",
            [],
        )
        try:
            state = agent.postXferReq(handle, b"")
        except NIXL_ERRORS:
            agent.releaseXferReq(handle)
            raise
        if state == bindings.NIXL_IN_PROG:
            read.handles.append(handle)
        else:
            agent.releaseXferReq(handle)

    def _descriptors(self, memory: _Memory, offsets: Any, lengths: Any) -> Any:
        table = np.empty((len(offsets), 3), dtype=np.uint64)
        np.add(offsets, memory.address, out=table[:, 0])
        table[:, 1] = lengths
        table[:, 2] = memory.device
        return bindings.nixlXferDList(memory.segment, table)
