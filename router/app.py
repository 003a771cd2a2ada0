"""A whole router in one event loop: sessions with workers, gRPC and HTTP.

1. ``start`` reads the model's text files, binds both ports, opens the sessions.
2. Health of the inference service follows readiness: whether a request sent now could be served.
3. ``stop`` refuses new requests (health first), gives those in flight ``drain_timeout_s``, then closes everything.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from twinpool.config import Config
from twinpool.errors import ConfigError
from twinpool.proto.admin_pb2_grpc import add_AdminServiceServicer_to_server
from twinpool.proto.inference_pb2_grpc import (
    add_InferenceServiceServicer_to_server,
    add_InfoServiceServicer_to_server,
)
from twinpool.router.admin_service import NAME as ADMIN
from twinpool.router.admin_service import AdminServicer
from twinpool.router.admission import Admission, capacity
from twinpool.router.api_keys import ApiKeys
from twinpool.router.discovery import Resolve, make_discovery, resolve_all
from twinpool.router.estimate_metrics import EstimateMetrics
from twinpool.router.flow import FlowContext
from twinpool.router.grpc_service import INFERENCE, INFO, InferenceServicer, InfoServicer
from twinpool.router.http_server import HttpServer
from twinpool.router.http_service import HttpService
from twinpool.router.intake import Intake
from twinpool.router.journal import Journal
from twinpool.router.metrics import RouterMetrics
from twinpool.router.registry import Registry
from twinpool.router.routing import Routing
from twinpool.router.telemetry import make_exporter
from twinpool.router.text import ModelText
from twinpool.router.trace import TraceBook
from twinpool.router.worker_metrics import WorkerMetrics
from twinpool.rpc import Keepalive, RpcServer, Servicer
from twinpool.tls import internal_server, public_server

log = logging.getLogger(__name__)

_LAST_WORDS_S = 1.0
"""For messages on their way to clients when the drain time is over."""


class Router:
    """See the module docstring; made by ``start``."""

    def __init__(
        self,
        config: Config,
        registry: Registry,
        admission: Admission,
        intake: Intake,
        rpc: RpcServer,
        http: HttpServer,
        journal: Journal,
        admin: RpcServer | None,
    ) -> None:
        self._config = config
        self._journal = journal
        self.intake = intake
        self._registry = registry
        self._admission = admission
        self._rpc = rpc
        self._http = http
        self._admin = admin
        self._health: asyncio.Task[None] | None = None
        self.grpc_port = rpc.port
        self.http_port = http.port
        self.admin_port = None if admin is None else admin.port

    @classmethod
    async def start(cls, config: Config, model_folder: Path, resolve: Resolve = resolve_all) -> Router:
        """Starts serving; readiness follows as workers connect.

        Raises:
            ConfigError: a port is in use, or the model folder is unusable.
        """
        text = ModelText.load(model_folder)
        registry, metrics = Registry(config, make_discovery(config, resolve)), RouterMetrics()
        routing = Routing(registry, config.router.pace_weight)
        metrics.registry.register(WorkerMetrics(registry))
        metrics.registry.register(EstimateMetrics(registry, routing))
        keys = ApiKeys(config.auth)
        admission = Admission(config.router, lambda: capacity(registry.views(), config.router))
        journal = Journal(TraceBook(config.router.kept_traces), make_exporter(config.router.otlp_endpoint))
        intake = Intake(FlowContext(config.router, registry, text, metrics, routing, journal), admission)
        inference, info = InferenceServicer(intake, text, keys), InfoServicer(registry, admission, journal.book)
        servicers = [
            Servicer(INFERENCE, lambda server: add_InferenceServiceServicer_to_server(inference, server)),
            Servicer(INFO, lambda server: add_InfoServiceServicer_to_server(info, server)),
        ]
        app = HttpService(config.router, intake, registry, admission, text, metrics, keys).app
        tls = public_server(config.tls)
        section = config.router
        keepalive = Keepalive(section.keepalive_s, section.keepalive_timeout_s, section.opening_timeout_s)
        http = HttpServer(app, section.host, section.http_port, tls, keepalive)
        try:
            rpc = await RpcServer.start(
                config.router.host,
                config.router.grpc_port,
                servicers,
                tls=tls,
                health_port=config.router.health_port,
                authenticate=keys.authenticate if keys.required else None,
                keepalive=keepalive,
            )
        except ConfigError:
            await http.stop()
            raise
        try:
            admin = await _start_admin(config, registry)
        except ConfigError:
            await asyncio.gather(rpc.stop(0), http.stop())
            raise
        await rpc.set_serving(INFO, True)
        http.start()
        registry.start()
        router = cls(config, registry, admission, intake, rpc, http, journal, admin)
        router._health = asyncio.create_task(router._follow_readiness())
        log.info("router %s: gRPC on port %d, HTTP on port %d", registry.identity.router_id, rpc.port, http.port)
        return router

    @property
    def registry(self) -> Registry:
        """The workers."""
        return self._registry

    @property
    def admission(self) -> Admission:
        """The requests in flight."""
        return self._admission

    async def wait_ready(self) -> None:
        """Returns when a request could be served."""
        while self._registry.not_ready_reason:
            await self._registry.wait_changed()

    async def stop(self, drain_timeout_s: float | None = None) -> bool:
        """Drains and stops; False when requests were cut off because the drain time was over."""
        timeout_s = self._config.router.drain_timeout_s if drain_timeout_s is None else drain_timeout_s
        if self._health is not None:
            self._health.cancel()
        await self._rpc.set_serving(INFERENCE, False)
        drained = await self._admission.drain(timeout_s)
        await asyncio.gather(self._rpc.stop(_LAST_WORDS_S if drained else 0), self._http.stop())
        if self._admin is not None:
            await self._admin.stop(0)
        await self._registry.stop()
        await asyncio.to_thread(self._journal.close)
        return drained

    async def _follow_readiness(self) -> None:
        serving = False
        while True:
            self._admission.pump()  # what changed may have brought room
            ready = not self._registry.not_ready_reason
            if ready != serving:
                serving = ready
                await self._rpc.set_serving(INFERENCE, ready)
                log.info("router is %s", "ready" if ready else f"not ready: {self._registry.not_ready_reason}")
            else:
                await self._registry.wait_changed()


async def _start_admin(config: Config, registry: Registry) -> RpcServer | None:
    """Serves operators on loopback, if the configuration says so. Raises ConfigError: the port is in use."""
    if config.router.admin_port is None:
        return None
    admin = AdminServicer(registry)
    services = [Servicer(ADMIN, lambda server: add_AdminServiceServicer_to_server(admin, server))]
    tls, token = internal_server(config.tls), config.session.token
    server = await RpcServer.start("127.0.0.1", config.router.admin_port, services, token, tls)
    await server.set_serving(ADMIN, True)
    return server
