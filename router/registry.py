"""All workers: their sessions, what they said last, and who may work with whom.

1. ``Registry.start`` follows the discovery and opens a session per address, each in its own task.
2. An address that disappears keeps its session until the session ends by itself: the worker drains, and says so, or it
   serves on, because only the discovery had failed. Without a connection it goes at once.
3. ``stop`` cancels all sessions, which ends their attempts.

After every change the registry tells each decode worker the prefill workers it may link to, and wakes whoever waits for
a change. One router serves one model: the configured name, or that of the first worker.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket

from twinpool.config import Config
from twinpool.router.costs import EqualCosts
from twinpool.router.discovery import Discovery
from twinpool.router.messages import LinkReport, Peer, WorkerInfo
from twinpool.router.policy import Mode, NoRoute, RouteQuery, WorkerKey, WorkerView, choose, incompatibility
from twinpool.router.worker_session import RouterIdentity, WorkerSession
from twinpool.rpc import Dialer

log = logging.getLogger(__name__)


class Registry:
    """The sessions with all workers; a ``Directory``."""

    def __init__(self, config: Config, discovery: Discovery) -> None:
        self._config = config.session
        self._discovery = discovery
        self._mode: Mode = config.router.disaggregate
        self._configured_model = config.model.name
        identity = RouterIdentity(f"router-{socket.gethostname()}-{secrets.token_hex(4)}", secrets.randbits(64) | 1)
        self.identity = identity
        self._dialer = Dialer.of(config)
        self._sessions: dict[str, WorkerSession] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._following: asyncio.Task[None] | None = None
        self._stopped = False
        self._change = asyncio.Event()
        self._seen_model: str | None = None

    def start(self) -> None:
        """Opens sessions as workers are found."""
        self._following = asyncio.create_task(self._follow())

    async def stop(self) -> None:
        """Ends all sessions."""
        self._stopped = True
        tasks = [*self._tasks.values(), *([self._following] if self._following is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def sessions(self) -> list[WorkerSession]:
        """Those of all workers that are known, connected or not."""
        return list(self._sessions.values())

    async def _follow(self) -> None:
        async for found in self._discovery.changes():
            for address in sorted(found - self._sessions.keys()):
                self._open(address)
            for address, session in self._sessions.items():
                session.listed = address in found
                if not session.listed and not session.usable:
                    self._tasks[address].cancel()
            self._wake()

    def _open(self, address: str) -> None:
        self._sessions[address] = WorkerSession(address, self._config, self.identity, self, self._dialer)
        self._tasks[address] = task = asyncio.create_task(self._sessions[address].run(), name=address)
        task.add_done_callback(self._drop)

    def _drop(self, task: asyncio.Task[None]) -> None:
        """Forgets a session that has ended: its worker was no longer listed, or the router stops."""
        address = task.get_name()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the session with %s failed", address, exc_info=error)
        session = self._sessions.pop(address)
        del self._tasks[address]
        if session.listed and not self._stopped:  # it came back while the session was ending
            self._open(address)
        self._wake()

    def views(self) -> list[WorkerView]:
        """The connected workers."""
        return [view for session in self.sessions if (view := session.view()) is not None]

    def session_of(self, key: WorkerKey) -> WorkerSession | None:
        """The session of a connected worker."""
        for session in self.sessions:
            if session.usable and session.info is not None and (session.info.worker_id, session.info.epoch) == key:
                return session
        return None

    async def wait_changed(self) -> None:
        """Returns after the next change of any worker."""
        await self._change.wait()

    @property
    def model(self) -> str | None:
        """Name of the served model; None before any worker told it."""
        return self._configured_model or self._seen_model

    @property
    def max_model_len(self) -> int | None:
        """Longest prompt plus answer that every connected worker takes; None when none is connected."""
        return min((view.info.max_model_len for view in self.views()), default=None)

    @property
    def vocab_size(self) -> int | None:
        """Bound of token ids; None when no worker is connected."""
        return min((view.info.vocab_size for view in self.views()), default=None)

    @property
    def max_num_seqs(self) -> int | None:
        """Most choices that every connected decode worker runs at once."""
        return min((view.info.max_num_seqs for view in self.views() if view.info.role == "decode"), default=None)

    @property
    def not_ready_reason(self) -> str:
        """Why a request sent now could not be served; empty when it could."""
        query = RouteQuery(num_tokens=1, mode=self._mode)
        route = choose(query, self.views(), EqualCosts())
        return route.message if isinstance(route, NoRoute) else ""

    def links_of(self, decode: WorkerSession) -> list[LinkReport]:
        """The links of a decode worker, the ones that must not be used with the reason."""
        if decode.info is None or decode.info.role != "decode":
            return []
        links = {link.worker_id: link for link in decode.report.links}
        for session in self.sessions:
            info = session.info
            if info is not None and info.role == "prefill" and session.usable:
                reason = incompatibility(info, decode.info)
                if reason is not None:
                    links[info.worker_id] = LinkReport(info.worker_id, info.epoch, False, error=reason)
        return list(links.values())

    def refusal(self, session: WorkerSession, info: WorkerInfo) -> str | None:
        """Checks a new worker against the others; see ``Directory``."""
        if info.role not in ("prefill", "decode"):
            return f"{info.worker_id} has role {info.role!r}; known are prefill and decode"
        for other in self.sessions:
            if other is not session and other.usable and other.info and other.info.worker_id == info.worker_id:
                return (
                    f"worker id {info.worker_id} is taken by {other.address}; give each worker its own "
                    "(worker_id), and list each address once in router.workers"
                )
        if not self.views() and self._configured_model is None:
            self._seen_model = info.model
        if self.model is not None and info.model != self.model:
            return f"{info.worker_id} serves model {info.model!r}, this router {self.model!r}"
        return None

    def changed(self, session: WorkerSession) -> None:
        """Pushes peers and wakes waiters; see ``Directory``."""
        for decode in self.sessions:
            if decode.usable and decode.info is not None and decode.info.role == "decode":
                decode.set_peers(self._peers_for(decode.info))
        self._wake()

    def _wake(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    def _peers_for(self, decode: WorkerInfo) -> frozenset[Peer]:
        infos = [session.info for session in self.sessions if session.usable and session.info is not None]
        return frozenset(
            Peer(info.worker_id, info.epoch, info.kv_address)
            for info in infos
            if info.role == "prefill" and incompatibility(info, decode) is None
        )
