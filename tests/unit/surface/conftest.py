"""A router for the client's tests: real gRPC, answers by script."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import grpc.aio
import pytest

from twinpool.proto import inference_pb2 as pb
from twinpool.proto import inference_pb2_grpc as pb_grpc
from twinpool.rpc import RpcServer, Servicer

Script = Callable[[pb.GenerateRequest], AsyncIterator[pb.GenerateResponse]]


class ScriptedRouter(pb_grpc.InferenceServiceServicer, pb_grpc.InfoServiceServicer):
    """Answers Generate with ``script``; keeps what it was asked."""

    def __init__(self) -> None:
        self.requests: list[pb.GenerateRequest] = []
        self.metadata: list[dict[str, str]] = []
        self.time_left: list[float | None] = []
        self.cancelled = 0
        self.script: Script = answer
        self.address = ""

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.time_left.append(context.time_remaining())
        await context.send_initial_metadata((("x-request-id", request.request_id or "made-1"),))
        finished = False
        try:
            async for response in self.script(request):
                yield response
            finished = True
        finally:
            self.cancelled += not finished

    async def ListModels(
        self, request: pb.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[pb.Model(id="tiny", max_model_len=64, revision="abc")])

    async def GetStatus(self, request: pb.GetStatusRequest, context: grpc.aio.ServicerContext) -> pb.GetStatusResponse:
        link = pb.Link(prefill_worker="prefill-0", linked=True, transport="nixl/shm", gigabytes_per_second=2.5)
        worker = pb.WorkerStatus(worker_id="decode-0", role="decode", state="alive", free_blocks=7, total_blocks=9)
        worker.links.append(link)
        return pb.GetStatusResponse(version="0.1.0", workers=[worker], in_flight=2, ready=True)


async def answer(request: pb.GenerateRequest) -> AsyncIterator[pb.GenerateResponse]:
    yield pb.GenerateResponse(text="The ", token_ids=[5], prompt_token_ids=[1, 2])
    yield pb.GenerateResponse(text="end", token_ids=[6, 7])
    yield pb.GenerateResponse(
        text=".",
        token_ids=[8],
        finish_reason=pb.FINISH_REASON_STOP,
        stop_reason="8",
        usage=pb.Usage(prompt_tokens=2, completion_tokens=4, remote_tokens=2, transport="nixl/shm"),
        timings=pb.Timings(total_s=0.5, first_token_s=0.25),
        prefill_worker="prefill-0",
        decode_worker="decode-0",
    )


@pytest.fixture
async def router() -> AsyncIterator[ScriptedRouter]:
    scripted = ScriptedRouter()

    def add(server: grpc.aio.Server) -> None:
        pb_grpc.add_InferenceServiceServicer_to_server(scripted, server)
        pb_grpc.add_InfoServiceServicer_to_server(scripted, server)

    server = await RpcServer.start("127.0.0.1", 0, [Servicer("twinpool.inference.v1.InferenceService", add)])
    scripted.address = f"127.0.0.1:{server.port}"
    yield scripted
    await server.stop(0)
