"""Where workers run: the interface between the pools and this machine, or a Ray cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, ...] = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class Replica:
    """A worker that is ready: its identity, and where routers dial it (host:port)."""

    role: Role
    worker_id: str
    address: str


class Fleet(Protocol):
    """Starts and ends workers; belongs to one event loop. Whoever adds or adopts a replica removes it."""

    def replicas(self, role: Role) -> Sequence[Replica]:
        """The workers that routers should use, oldest first."""

    async def wait_changed(self) -> None:
        """Returns after the next change of any pool's replicas."""

    async def add(self, role: Role) -> Replica:
        """Starts a worker; returns when it is ready. Cancelled or failed, it leaves nothing.

        Raises:
            TwinpoolError: it did not become ready; says why.
        """

    def retire(self, replica: Replica) -> None:
        """Takes a worker out of ``replicas``, so that routers send it nothing new; ``drain`` must follow."""

    async def drain(self, replica: Replica) -> None:
        """Lets a retired worker finish or hand over what it runs; returns when it has ended."""

    async def capacity(self, role: Role) -> int:
        """The most workers of ``role`` that fit beside the other pool, those that run included."""
