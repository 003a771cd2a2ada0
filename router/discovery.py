"""Which workers there are: a ``Discovery`` yields the complete set of their addresses each time that it changes.

Three kinds, by ``router.discovery``. ``static`` is the list in ``router.workers``. ``dns`` resolves the names there
(headless Services on Kubernetes) every ``router.discovery_interval_s`` to all their addresses. ``controller`` follows
the process that starts and drains the workers (``twinpool up``, or ``twinpool serve controller`` on Ray). None of them
says that a worker works or has died: that is the business of its session, which a disappearing address does not end
(see ``registry``). So a discovery that fails changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Protocol

import grpc.aio

from twinpool.config import Config
from twinpool.proto import controller_pb2, controller_pb2_grpc
from twinpool.rpc import Dialer, dialled

log = logging.getLogger(__name__)

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""All addresses (IPv4, or IPv6 without brackets) of a name; empty when it has none now; OSError when nobody knows."""

# The resolver's answers that are certain; others (no server answers) say nothing about the name.
_NO_ADDRESS = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))


class Discovery(Protocol):
    """Finds workers; never raises, goes on for ever."""

    def changes(self) -> AsyncIterator[frozenset[str]]:
        """Yields all addresses (host:port), first as soon as they are known, then after each change."""


class StaticDiscovery:
    """A list that never changes."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = frozenset(addresses)

    async def changes(self) -> AsyncIterator[frozenset[str]]:
        """See ``Discovery``."""
        yield self._addresses


class DnsDiscovery:
    """All addresses of some names, asked for again and again.

    A name that cannot be resolved at the moment keeps the addresses that it had; a name without addresses has none.
    """

    def __init__(self, names: Sequence[str], interval_s: float, resolve: Resolve) -> None:
        self._names = [(host.strip("[]"), int(port)) for host, _, port in (name.rpartition(":") for name in names)]
        self._interval_s = interval_s
        self._resolve = resolve

    async def changes(self) -> AsyncIterator[frozenset[str]]:
        """See ``Discovery``."""
        known: Mapping[tuple[str, int], frozenset[str]] = {}
        last: frozenset[str] | None = None
        while True:
            answers = await asyncio.gather(*(self._ask(name) for name in self._names))
            found = zip(self._names, answers, strict=True)
            known = {name: known.get(name, frozenset()) if new is None else new for name, new in found}
            current = frozenset().union(*known.values())
            if current != last:
                last = current
                yield current
            await asyncio.sleep(self._interval_s)

    async def _ask(self, name: tuple[str, int]) -> frozenset[str] | None:
        host, port = name
        try:
            addresses = await self._resolve(host, port)
        except OSError as error:
            log.warning("%s cannot be resolved (%s); its workers stay as they are", host, error)
            return None
        return frozenset(f"[{address}]:{port}" if ":" in address else f"{address}:{port}" for address in addresses)


class ControllerDiscovery:
    """What the controller says; while it does not answer, nothing changes."""

    def __init__(self, address: str, dialer: Dialer) -> None:
        self._address = address
        self._dialer = dialer

    async def changes(self) -> AsyncIterator[frozenset[str]]:
        """See ``Discovery``."""
        while True:
            async with self._dialer.channel(self._address) as opened:
                stub = controller_pb2_grpc.ControllerServiceStub(opened)
                try:
                    async for workers in stub.Watch(controller_pb2.WatchRequest(), wait_for_ready=True):
                        yield frozenset(workers.addresses)
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.UNAVAILABLE:  # else it is away, as during its restart
                        log.warning("controller %s: %s", self._address, error.details())
            await asyncio.sleep(1.0)


async def resolve_all(host: str, port: int) -> Sequence[str]:
    """A ``Resolve`` that asks the system's resolver, off the loop's thread."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in _NO_ADDRESS:
            return ()
        raise
    return [str(address[0]) for *_, address in found]


def make_discovery(config: Config, resolve: Resolve) -> Discovery:
    """The discovery that the configuration names; ``resolve`` serves ``dns``."""
    router = config.router
    match router.discovery:
        case "static":
            return StaticDiscovery(router.workers)
        case "dns":
            return DnsDiscovery(router.workers, router.discovery_interval_s, resolve)
        case "controller":
            address = f"{dialled(config.controller.host)}:{config.controller.known_port}"
            return ControllerDiscovery(address, Dialer.of(config))
