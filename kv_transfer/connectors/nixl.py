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

5. A link's first read of whole blocks prepares NIXL's descriptors of all blocks of both regions; reads of whole blocks
   then name them by id, which takes a fraction of the time of describing them. They are freed by ``close``. Where
   planning merged neighbours, or copies parts of blocks, descriptors are made per request.
"""

from __future__ import annotations

import itertools
import secrets
import struct
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import nixl._api as nixl_api
import nixl._bindings as bindings
import numpy as np
import torch

from twinpool.kv_transfer.block_table import BlockTable
from twinpool.kv_transfer.connectors.base import ConnectorError, Read, ReadState, Send, check_table
from twinpool.kv_transfer.connectors.region import zeroed_region
from twinpool.kv_transfer.connectors.ucx import ProtocolLog, UcxSettings, protocol_log
from twinpool.kv_transfer.copy_table import CopyTable, Rows

SLICE_BYTES = 16 << 20
SLICE_RANGES = 1024
POST_BUDGET_S = 0.004
MAX_IN_FLIGHT = 4
MAX_PREPARED = 1 << 17
"""Blocks of a region of which descriptors are prepared, in about 0.2 µs each; of more, none are."""

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
    left: deque[CopyTable] = field(default_factory=deque)
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
        self._prepared: dict[int, tuple[int, int]] = {}
        # Of source and target, as columns of descriptors.
        self._addresses = np.array([[source.address], [region.address]], np.int64)
        self._devices = np.array([[source.device], [region.device]], np.int64)

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

    def read(self, table: CopyTable) -> NixlRead:
        """Posts the first slice. Raises ConnectorError if the peer is gone."""
        check_table(table, self._source.num_bytes, self._region.num_bytes)
        if self._agent is None:
            raise ConnectorError("the link is closed")
        read = NixlRead(table.num_bytes, deque(table.slices(SLICE_BYTES, SLICE_RANGES)))
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
        # Requests have copies of what they need of these.
        for handle in itertools.chain.from_iterable(self._prepared.values()):
            self._agent.agent.releasedDlistH(handle)
        self._prepared.clear()
        # The last reference: the C++ agent dies here. Handles in flight are not released, see the module.
        self._agent = None

    def _post(self, read: NixlRead) -> None:
        """Posts the next slice; raises one of NIXL_ERRORS, after which nothing of this slice can land."""
        agent = self._agent.agent
        handle = self._request(read.left.popleft())
        try:
            state = agent.postXferReq(handle, b"")
        except NIXL_ERRORS:
            agent.releaseXferReq(handle)
            raise
        if state == bindings.NIXL_IN_PROG:
            read.handles.append(handle)
        else:
            agent.releaseXferReq(handle)

    def _request(self, part: CopyTable) -> int:
        """Makes the request of a slice; its raw handle."""
        agent = self._agent.agent
        if isinstance(part, BlockTable):
            prepared = self._prepared.get(part.block_bytes) or self._prepare(part.block_bytes)
            if prepared is not None:
                source, target = prepared
                handle: int = agent.makeXferReq(bindings.NIXL_READ, target, part.target, source, part.source, b"", [])
                return handle
        source, target = self._descriptors(part.rows)
        handle = agent.createXferReq(bindings.NIXL_READ, target, source, self._remote, b"", [])
        return handle

    def _prepare(self, block_bytes: int) -> tuple[int, int] | None:
        """Prepares descriptors of all blocks; the handles for source and target, None if there are too many blocks."""
        counts = self._source.num_bytes // block_bytes, self._region.num_bytes // block_bytes
        if max(counts) > MAX_PREPARED:
            return None
        rows = np.empty((max(counts), 3), np.int64)
        rows[:, :2] = np.arange(max(counts))[:, None] * block_bytes
        rows[:, 2] = block_bytes
        agent = self._agent.agent
        source, _ = self._descriptors(rows[: counts[0]])
        _, target = self._descriptors(rows[: counts[1]])
        target_handle = agent.prepXferDlist("", target, [])
        try:
            source_handle = agent.prepXferDlist(self._remote, source, [])
        except NIXL_ERRORS:
            agent.releasedDlistH(target_handle)
            raise
        prepared = self._prepared[block_bytes] = (source_handle, target_handle)
        return prepared

    def _descriptors(self, rows: Rows) -> tuple[Any, Any]:
        """NIXL's descriptor lists of source and target: rows of (address, length, device)."""
        both = np.empty((2, len(rows), 3), np.int64)
        np.add(rows[:, :2].T, self._addresses, out=both[:, :, 0])
        both[:, :, 1] = rows[:, 2]
        both[:, :, 2] = self._devices
        source, target = both.view(np.uint64)
        return bindings.nixlXferDList(self._source.segment, source), bindings.nixlXferDList(
            self._region.segment, target
        )
