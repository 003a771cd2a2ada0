"""The controller's gRPC service: translates, asks the pools, translates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import grpc.aio

from twinpool.config import Config
from twinpool.controller.fleet import ROLES, Fleet, Role
from twinpool.controller.pool import Pool, Step
from twinpool.errors import InvalidRequest
from twinpool.proto import controller_pb2, controller_pb2_grpc
from twinpool.rpc import RpcServer, Servicer
from twinpool.tls import internal_server

NAME = "twinpool.controller.v1.ControllerService"
_ACTIONS = {
    "added": controller_pb2.ScaleResponse.ACTION_ADDED,
    "removed": controller_pb2.ScaleResponse.ACTION_REMOVED,
    "failed": controller_pb2.ScaleResponse.ACTION_FAILED,
}


class ControllerServicer(controller_pb2_grpc.ControllerServiceServicer):
    """Serves routers and ``twinpool scale``."""

    def __init__(self, fleet: Fleet, pools: Mapping[Role, Pool], least: Mapping[Role, int]) -> None:
        """``least`` is the size below which nothing could be served."""
        self._fleet = fleet
        self._pools = pools
        self._least = least

    async def Watch(
        self, request: controller_pb2.WatchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[controller_pb2.WatchResponse]:
        """See controller.proto."""
        while True:
            changed = asyncio.ensure_future(self._fleet.wait_changed())
            try:
                addresses = [replica.address for role in ROLES for replica in self._fleet.replicas(role)]
                yield controller_pb2.WatchResponse(addresses=addresses)
                await changed
            finally:
                changed.cancel()

    async def Scale(
        self, request: controller_pb2.ScaleRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[controller_pb2.ScaleResponse]:
        """See controller.proto."""
        pool = next((self._pools[role] for role in ROLES if role == request.pool), None)
        if pool is None:
            raise InvalidRequest(f"there is no pool {request.pool!r}; the pools are prefill and decode", "pool")
        least = self._least[pool.role]
        size = await self._fleet.capacity(pool.role) if request.WhichOneof("size") == "max" else request.replicas
        if size < least:
            raise InvalidRequest(
                f"the {pool.role} pool needs {least} or more; `twinpool scale all 0` ends all workers", "replicas"
            )
        async for step in pool.scale(size):
            yield _response(step)

    async def Clear(
        self, request: controller_pb2.ClearRequest, context: grpc.aio.ServicerContext
    ) -> controller_pb2.ClearResponse:
        """See controller.proto."""

        async def empty(pool: Pool) -> None:
            async for _ in pool.scale(0):
                pass

        await asyncio.gather(*(empty(pool) for pool in self._pools.values()))
        return controller_pb2.ClearResponse()


def least_sizes(config: Config) -> Mapping[Role, int]:
    """The sizes below which the configured deployment could not serve."""
    return {"prefill": 1 if config.router.disaggregate == "always" else 0, "decode": 1}


async def serve(config: Config, fleet: Fleet, pools: Mapping[Role, Pool]) -> RpcServer:
    """Starts the service where the configuration says.

    Raises:
        ConfigError: the address cannot be bound.
    """
    servicer = ControllerServicer(fleet, pools, least_sizes(config))
    add: Callable[..., None] = controller_pb2_grpc.add_ControllerServiceServicer_to_server
    services = [Servicer(NAME, lambda server: add(servicer, server))]
    controller, tls = config.controller, internal_server(config.tls)
    return await RpcServer.start(controller.host, controller.known_port, services, config.session.token, tls)


def _response(step: Step) -> controller_pb2.ScaleResponse:
    return controller_pb2.ScaleResponse(
        action=_ACTIONS[step.action],
        worker_id=step.worker_id,
        seconds=step.seconds,
        replicas=step.replicas,
        error=step.error,
    )
