"""The way in, the same for gRPC and HTTP: admission, validation, tokenisation; the result is a flow.

``open`` takes the admission ticket first, so that nothing is tokenised for a request that will be refused; the ticket
belongs to the flow from the moment that it exists.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from twinpool.config import Disaggregate
from twinpool.errors import InvalidRequest, TwinpoolError
from twinpool.proto import inference_pb2
from twinpool.router.admission import Admission
from twinpool.router.caller import ANYBODY, Caller
from twinpool.router.flow import Flow, FlowContext
from twinpool.router.validation import Limits, resolve

_ANY_LENGTH = 1 << 30


class Intake:
    """Opens flows for public requests."""

    def __init__(self, context: FlowContext, admission: Admission) -> None:
        self._context = context
        self._admission = admission

    async def open(
        self,
        request: inference_pb2.GenerateRequest,
        caller: Caller = ANYBODY,
        deadline_s: float | None = None,
        route: str | None = None,
        traceparent: str = "",
    ) -> Flow:
        """A flow that is ready to be read; whoever gets it reads it or closes it.

        A priority better than the caller's best is lowered to that. ``route`` (local, remote) overrides
        ``router.disaggregate`` where ``router.route_hints`` allows it; ``traceparent`` is the client's trace.

        Raises:
            TwinpoolError: the request was refused.
        """
        arrival = asyncio.get_running_loop().time()
        config = self._context.config
        most = config.default_deadline_s
        try:
            if request.priority < caller.best_priority:
                request.priority = caller.best_priority
            deadline_s = min(deadline_s or most, most)
            stopping = request.stopping
            max_tokens = stopping.max_tokens if stopping.HasField("max_tokens") else _ANY_LENGTH
            ticket = self._admission.admit(caller, request.priority, deadline_s, max_tokens)
            try:
                mode = config.disaggregate if route is None else _mode(route, config.route_hints)
                resolved = replace(await resolve(request, self._context.text, self.limits()), traceparent=traceparent)
                return Flow(resolved, self._context, ticket, arrival, deadline_s, mode)
            except BaseException:
                ticket.release()
                raise
        except TwinpoolError as error:
            self._context.metrics.rejected(error.kind)
            raise

    def limits(self) -> Limits:
        """What the connected workers take now."""
        registry = self._context.registry
        return Limits(registry.model, registry.max_model_len, registry.vocab_size, registry.max_num_seqs)


def _mode(route: str, allowed: bool) -> Disaggregate:
    if not allowed:
        raise InvalidRequest("x-twinpool-route is not taken here; set router.route_hints, or leave it out", "route")
    if route == "local":
        return "never"
    if route == "remote":
        return "always"
    raise InvalidRequest(f"x-twinpool-route is {route!r}; it must be local or remote", "route")
