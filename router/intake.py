"""The way in, the same for gRPC and HTTP: admission, validation, tokenisation; the result is a flow.

``open`` takes the admission ticket first, so that nothing is tokenised for a request that will be refused; the ticket
belongs to the flow from the moment that it exists.
"""

from __future__ import annotations

import asyncio

from twinpool.errors import TwinpoolError
from twinpool.proto import inference_pb2
from twinpool.router.admission import Admission
from twinpool.router.flow import Flow, FlowContext
from twinpool.router.validation import Limits, resolve


class Intake:
    """Opens flows for public requests."""

    def __init__(self, context: FlowContext, admission: Admission) -> None:
        self._context = context
        self._admission = admission

    async def open(self, request: inference_pb2.GenerateRequest, deadline_s: float | None = None) -> Flow:
        """A flow that is ready to be read; whoever gets it reads it or closes it.

        Raises:
            TwinpoolError: the request was refused.
        """
        arrival = asyncio.get_running_loop().time()
        most = self._context.config.default_deadline_s
        try:
            ticket = self._admission.admit()
            try:
                resolved = await resolve(request, self._context.text, self.limits())
                return Flow(resolved, self._context, ticket, arrival, min(deadline_s or most, most))
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
