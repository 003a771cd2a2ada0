"""What operators ask of a deployment: translates, has the workers' sessions carry it out, translates.

The service has a port of its own, on loopback, guarded by the cluster token: nothing here is for clients.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc.aio

from twinpool.errors import NotFound
from twinpool.logs import set_level
from twinpool.proto import admin_pb2, admin_pb2_grpc, worker_pb2
from twinpool.router.messages import Report
from twinpool.router.registry import Registry
from twinpool.router.worker_session import WorkerSession

NAME = "twinpool.admin.v1.AdminService"
ROUTER = "router"


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """See admin.proto."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def Drain(
        self, request: admin_pb2.DrainRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.DrainResponse:
        """See admin.proto."""
        session = self._session(request.worker_id)
        drain = worker_pb2.Drain(enabled=not request.undo)
        if request.HasField("hand_over_s"):
            drain.hand_over_s = request.hand_over_s
        await session.order(worker_pb2.Order(drain=drain))
        while request.wait and not request.undo and session.usable and _unfinished(session.report):
            await self._registry.wait_changed()
        return admin_pb2.DrainResponse(requests=_unfinished(session.report))

    async def FlushCache(
        self, request: admin_pb2.FlushCacheRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.FlushCacheResponse:
        """See admin.proto."""
        names = await self._tell(self._connected(), worker_pb2.Order(flush_cache=worker_pb2.FlushCache()))
        return admin_pb2.FlushCacheResponse(worker_ids=names)

    async def SetLogLevel(
        self, request: admin_pb2.SetLogLevelRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.SetLogLevelResponse:
        """See admin.proto."""
        sessions, names = self._connected(), []
        if request.target not in ("", ROUTER):
            sessions = [self._session(request.target)]
        if request.target in ("", ROUTER):
            set_level(request.level)
            names.append(ROUTER)
        if request.target != ROUTER:
            names += await self._tell(sessions, worker_pb2.Order(log_level=request.level))
        return admin_pb2.SetLogLevelResponse(names=names)

    def _connected(self) -> list[WorkerSession]:
        return [session for session in self._registry.sessions if session.usable]

    def _session(self, worker_id: str) -> WorkerSession:
        """The worker's session. Raises NotFound."""
        known = {session.info.worker_id: session for session in self._registry.sessions if session.info is not None}
        if worker_id not in known:
            raise NotFound(f"there is no worker {worker_id!r}; the workers are {', '.join(sorted(known)) or 'none'}")
        return known[worker_id]

    async def _tell(self, sessions: Sequence[WorkerSession], order: worker_pb2.Order) -> list[str]:
        """Has all of them carry out the order; returns their names."""
        copies = [worker_pb2.Order() for _ in sessions]
        for copy in copies:
            copy.CopyFrom(order)
        await asyncio.gather(*(session.order(copy) for session, copy in zip(sessions, copies, strict=True)))
        return sorted(session.info.worker_id for session in sessions if session.info is not None)


def _unfinished(report: Report) -> int:
    return report.running + report.waiting + report.loading + report.held
