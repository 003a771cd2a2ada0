"""KV through torch.distributed, point to point: NCCL between GPUs, gloo (TCP) otherwise. Serves wherever torch runs.

1. ``metadata`` names the region: size, device, and a random nonce.
2. A link is a pair: a process group of two, outside torch's default group, with a thread on either side
   (``pair_group``, ``pair_backends``). The reader's ``connect`` asks the source for it through their session, which
   also carries the rendezvous (``pair_store``), so nothing listens but gloo, on the configured host alone.
3. Transfers are two-sided: the reader asks, the source's thread sends (``nccl_source``), the reader's thread receives
   into buffers of the link, and ``poll`` copies into the region (``nccl_link``). So ``progress`` has nothing to do.
4. ``close`` of a link tells the source, which ends its half; ``dismiss`` ends all pairs of a session.

NCCL takes no two ranks on one GPU. A pair on one GPU, as with ourselves at start-up, and one that has a GPU on one side
only, use gloo with pinned host buffers.

A killed peer breaks gloo's connections at once. NCCL may not notice; there the end of the session, or the bound of a
read, closes the link, which aborts the communicator.
"""

from __future__ import annotations

import secrets
import socket
import struct
import uuid
from typing import Any

import torch

from twinpool.kv_transfer.connectors.base import ConnectorError, Send
from twinpool.kv_transfer.connectors.nccl_link import NcclLink
from twinpool.kv_transfer.connectors.nccl_source import NcclSource
from twinpool.kv_transfer.connectors.pair_backends import gloo_listener, tame_nccl
from twinpool.kv_transfer.connectors.pair_messages import (
    EndPair,
    OpenPair,
    PairKey,
    ReadSlice,
    Transport,
    decode,
    encode,
)
from twinpool.kv_transfer.connectors.region import zeroed_region

CONNECT_TIMEOUT_S = 10.0
JOIN_TIMEOUT_S = 2.0

_MAGIC = b"twinnccl"
_HEADER = struct.Struct("<8s16sQ16s")
_HOST = bytes(16)
"""In place of a GPU's UUID."""


class NcclConnector:
    """One rank's end; see the module. ``host`` is the address that gloo listens on; a wildcard is replaced."""

    def __init__(self, host: str, connect_timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        self._listener: Any = gloo_listener(data_host(host))
        self._connect_timeout_s = connect_timeout_s
        self._nonce = secrets.token_bytes(16)
        self._device = _HOST
        self._region: torch.Tensor | None = None
        self._links: list[NcclLink] = []
        self._sends: dict[str, Send] = {}
        self._sources: dict[tuple[str, int], NcclSource] = {}

    @property
    def name(self) -> str:
        """Always nccl."""
        return "nccl"

    @property
    def pumped(self) -> bool:
        """Sources send on threads of their own."""
        return False

    def allocate(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Allocates the region, zeroed."""
        if self._region is not None:
            raise ConnectorError("the region is already allocated")
        if device.type == "cuda":
            tame_nccl()
            self._device = uuid.UUID(str(torch.cuda.get_device_properties(device).uuid)).bytes
        self._region = zeroed_region(num_bytes, device)
        return self._region

    def metadata(self) -> bytes:
        """Nonce, size and device of the region."""
        return _HEADER.pack(_MAGIC, self._nonce, self._allocated().numel(), self._device)

    def connect(self, metadata: bytes, send: Send) -> NcclLink:
        """Asks for a pair; never waits for it: the first read does."""
        region = self._allocated()
        if len(metadata) != _HEADER.size or not metadata.startswith(_MAGIC):
            raise ConnectorError("not metadata of an nccl connector; use one connector in both pools")
        _, nonce, num_bytes, device = _HEADER.unpack(metadata)
        transport: Transport = "gloo" if _HOST in (device, self._device) or device == self._device else "nccl"
        link = NcclLink(
            secrets.randbits(64), nonce, num_bytes, transport, region, self._listener, send, self._connect_timeout_s
        )
        self._links = [other for other in self._links if not other.closed]
        self._links.append(link)
        return link

    def accept(self, peer: str, send: Send) -> None:
        """Takes payloads of ``peer`` from now on."""
        self._sends[peer] = send

    def deliver(self, peer: str, payload: bytes) -> None:
        """Takes what a link of ``peer`` says. ConnectorError if it makes no sense."""
        message = decode(payload)
        send = self._sends.get(peer)
        if send is None:
            return
        if isinstance(message, OpenPair):
            self._open(peer, message, send)
            return
        source = self._sources.get((peer, message.pair))
        if source is None:
            # It has failed, and the reader will hear, or has heard, of it.
            return
        match message:
            case PairKey():
                source.key(message)
            case ReadSlice():
                source.read(message)
            case EndPair():
                del self._sources[peer, message.pair]
                source.close()

    def dismiss(self, peer: str) -> None:
        """Ends all pairs of ``peer``. Idempotent."""
        self._sends.pop(peer, None)
        for key in [key for key in self._sources if key[0] == peer]:
            self._sources.pop(key).close()

    def progress(self) -> None:
        """Nothing to do: pairs have threads."""

    def close(self) -> None:
        """Ends all pairs, waits a moment for their threads, and frees the region."""
        ended: list[NcclLink | NcclSource] = [*self._links, *self._sources.values()]
        for pair in ended:
            pair.close()
        for pair in ended:
            pair.join(JOIN_TIMEOUT_S)
        self._links.clear()
        self._sources.clear()
        self._sends.clear()
        self._region = None
        self._listener = None

    def _open(self, peer: str, message: OpenPair, send: Send) -> None:
        region = self._allocated()
        if (peer, message.pair) in self._sources:
            raise ConnectorError("a reader opened one pair twice; run equal versions")
        if message.nonce != self._nonce:
            send(encode(EndPair(message.pair, "the region it was promised went with an earlier process")))
            return
        if message.transport == "nccl" and region.device.type != "cuda":
            raise ConnectorError("a reader wants NCCL, but the region is in host memory; run equal versions")
        self._sources[peer, message.pair] = NcclSource(message, region, self._listener, send, self._connect_timeout_s)

    def _allocated(self) -> torch.Tensor:
        if self._region is None:
            raise ConnectorError("the region is not allocated yet")
        return self._region


def data_host(host: str) -> str:
    """``host``, or for a wildcard the address that this machine's default route leaves from, else loopback.

    Peers connect to the very address that gloo is bound to, so it cannot be a wildcard.
    """
    if host not in ("", "0.0.0.0", "::"):
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Sends nothing: connecting a datagram socket only picks the route.
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        address: str = probe.getsockname()[0]
        return address
