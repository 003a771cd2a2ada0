"""The OpenAI-compatible HTTP API and the routes for probes, metrics and tokenisation."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from importlib import metadata

from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from twinpool.config import RouterSection
from twinpool.errors import (
    Cancelled,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    TwinpoolError,
    Unauthenticated,
    Unavailable,
)
from twinpool.proto import inference_pb2
from twinpool.router.admission import Admission
from twinpool.router.answer_reader import END_THINK, THINK, AnswerReader
from twinpool.router.api_keys import ApiKeys
from twinpool.router.completions import Completion
from twinpool.router.conversation import conversation_chars, read_conversation
from twinpool.router.flow import Flow
from twinpool.router.http_body import read_body
from twinpool.router.intake import Intake
from twinpool.router.metrics import RouterMetrics
from twinpool.router.openai_chat import ChatBody, TokenizeBody
from twinpool.router.openai_format import ChatFormat, CompletionFormat, Echo, Format, Json
from twinpool.router.openai_types import (
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    StreamOptions,
    parse,
)
from twinpool.router.registry import Registry
from twinpool.router.sse import EventStream, unless_disconnected
from twinpool.router.text import ModelText
from twinpool.router.tool_format import FORMATS, detect
from twinpool.router.validation import check_length

MAX_DETOKENIZE = 131_072
"""Tokens, while no worker has said how long its context is."""
_PARAMS = {"json_schema": "response_format", "token_ids": "prompt", "text": "prompt"}


class HttpService:
    """The handlers; ``app`` is the ASGI application."""

    def __init__(
        self,
        config: RouterSection,
        intake: Intake,
        registry: Registry,
        admission: Admission,
        text: ModelText,
        metrics: RouterMetrics,
        keys: ApiKeys,
    ) -> None:
        self._keys = keys
        self._intake = intake
        self._registry = registry
        self._admission = admission
        self._text = text
        self._metrics = metrics
        template = text.template_source
        self._tool_format = detect(template) if config.tool_format == "auto" else FORMATS[config.tool_format]
        self._thinks = config.reasoning == "auto" and END_THINK in template
        self.app = FastAPI(title="twinpool", docs_url=None, redoc_url=None, openapi_url=None)
        self._add_routes()

    def _add_routes(self) -> None:
        app = self.app
        for path, handler, method in (
            ("/v1/chat/completions", self.chat, "POST"),
            ("/v1/completions", self.completions, "POST"),
            ("/v1/models", self.models, "GET"),
            ("/v1/models/{name:path}", self.model, "GET"),
            ("/tokenize", self.tokenize, "POST"),
            ("/detokenize", self.detokenize, "POST"),
        ):
            guard = [Depends(self._authenticate)]
            app.add_api_route(path, handler, methods=[method], response_model=None, dependencies=guard)
        # Probes and Prometheus have no keys; what these say is no secret of a caller.
        app.add_api_route("/health", self.health, methods=["GET"], response_model=None)
        app.add_api_route("/ready", self.ready, methods=["GET"], response_model=None)
        app.add_api_route("/version", self.version, methods=["GET"], response_model=None)
        app.add_api_route("/metrics", self.metrics, methods=["GET"], response_model=None)
        app.add_exception_handler(TwinpoolError, _on_twinpool_error)
        app.add_exception_handler(HTTPException, _on_http_error)
        app.add_exception_handler(Exception, _on_defect)

    async def _authenticate(self, request: Request) -> None:
        """Says who the caller is, before a body is read."""
        request.state.caller = self._keys.caller(request.headers.get("authorization", ""))

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        body = parse(ChatBody, await read_body(request))
        message = body.to_request(request.headers.get("x-request-id", ""), self._tool_format)
        form = self._tool_format if body.offers_tools else None

        def make(flows: Sequence[Flow]) -> ChatFormat:
            thinking = self._thinks and self._text.decode(flows[0].request.prompt_ids[-8:]).rstrip().endswith(THINK)
            reader = partial(AnswerReader, form, self._thinks, thinking)
            return ChatFormat(self._text, bool(body.logprobs), reader)

        return await _answer(request, await self._open(request, [message], make), body)

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        body = parse(CompletionBody, await read_body(request))
        messages = body.to_requests(request.headers.get("x-request-id", ""))

        def form(flows: Sequence[Flow]) -> CompletionFormat:
            echoes = []
            if body.echo:
                for flow, message in zip(flows, messages, strict=True):
                    ids = flow.request.prompt_ids
                    is_text = message.WhichOneof("prompt") == "text"
                    echoes.append(Echo(message.text if is_text else self._text.decode(ids), ids))
            n = flows[0].request.n
            return CompletionFormat(self._text, body.logprobs is not None, n, echoes, body.echo_only)

        return await _answer(request, await self._open(request, messages, form), body)

    async def _open(
        self,
        request: Request,
        messages: Sequence[inference_pb2.GenerateRequest],
        make_format: Callable[[Sequence[Flow]], Format],
    ) -> Completion:
        trace = request.headers.get("traceparent", "")
        return await Completion.open(self._intake, messages, request.state.caller, make_format, trace)

    async def models(self) -> Json:
        """GET /v1/models."""
        limits = self._intake.limits()
        if limits.model is None:
            return {"object": "list", "data": []}
        entry = {
            "id": limits.model,
            "object": "model",
            "created": 0,
            "owned_by": "twinpool",
            "max_model_len": limits.max_model_len,
        }
        return {"object": "list", "data": [entry]}

    async def model(self, name: str) -> Json:
        """GET /v1/models/NAME."""
        entries: list[Json] = (await self.models())["data"]
        for entry in entries:
            if entry["id"] == name:
                return entry
        raise ModelNotFound(f"model {name!r} is not served here; GET /v1/models lists what is")

    async def tokenize(self, request: Request) -> Json:
        """POST /tokenize: token ids of a prompt or of messages."""
        body = parse(TokenizeBody, await read_body(request))
        self._check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("give either prompt or messages", "prompt")
        if body.messages is not None:
            messages = inference_pb2.ChatMessages(messages=[message.to_proto() for message in body.messages])
            check_length(conversation_chars(messages), self._text, self._intake.limits().max_model_len, "messages")
            ids = await asyncio.to_thread(self._text.encode_messages, read_conversation(messages))
        else:
            prompt = body.prompt or ""
            check_length(len(prompt), self._text, self._intake.limits().max_model_len, "prompt")
            ids = await asyncio.to_thread(self._text.encode_text, prompt)
        return {"tokens": ids, "count": len(ids), "max_model_len": self._intake.limits().max_model_len}

    async def detokenize(self, request: Request) -> Json:
        """POST /detokenize: text of token ids."""
        body = parse(DetokenizeBody, await read_body(request))
        self._check_model(body.model)
        most = self._intake.limits().max_model_len or MAX_DETOKENIZE
        if len(body.tokens) > most:
            raise InvalidRequest(
                f"there are {len(body.tokens)} tokens; at most {most}, the length of the context", "tokens"
            )
        if any(not 0 <= token_id < 2**32 for token_id in body.tokens):
            raise InvalidRequest("tokens holds a number that is no token id", "tokens")
        return {"prompt": await asyncio.to_thread(self._text.decode, body.tokens)}

    async def health(self) -> Json:
        """GET /health: the process is alive."""
        return {"status": "ok"}

    async def ready(self) -> Json:
        """GET /ready: a request sent now could be served."""
        reason = "the router is shutting down" if self._admission.draining else self._registry.not_ready_reason
        if reason:
            raise Unavailable(reason)
        return {"status": "ready"}

    async def version(self) -> Json:
        """GET /version."""
        return {"version": metadata.version("twinpool")}

    async def metrics(self) -> Response:
        """GET /metrics: Prometheus text."""
        workers: Counter[tuple[str, str]] = Counter(
            (session.info.role if session.info is not None else "unknown", session.state)
            for session in self._registry.sessions
        )
        text = self._metrics.exposition(self._admission.in_flight, self._admission.queued, dict(workers))
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    def _check_model(self, model: str) -> None:
        served = self._intake.limits().model
        if model and served is not None and model != served:
            raise ModelNotFound(f"model {model!r} is not served here; served: {served}")


async def _answer(request: Request, completion: Completion, body: GenerationBody) -> Response:
    try:
        if not body.stream:
            return JSONResponse(await unless_disconnected(request, completion.whole()))
        events = completion.events(body.stream_options or StreamOptions())
        first = await unless_disconnected(request, _first(events))
        return EventStream(first, events, error_body)
    except BaseException:
        completion.close()
        raise


async def _first(events: AsyncGenerator[Json, None]) -> Json:
    return await anext(events)


def error_body(error: TwinpoolError) -> Json:
    """An error in OpenAI's form."""
    field = error.field.rsplit(".", 1)[-1] if isinstance(error, InvalidRequest) else ""
    kind = "invalid_request_error" if error.http_status in (400, 404) else error.kind
    param = _PARAMS.get(field, field) or None
    return {"error": {"message": error.message, "type": kind, "param": param, "code": error.kind}}


async def _on_twinpool_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TwinpoolError)
    headers = {}
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, Cancelled):
        return Response(status_code=499)
    return JSONResponse(error_body(error), status_code=error.http_status, headers=headers)


async def _on_defect(request: Request, error: Exception) -> Response:
    # The server logs the traceback; clients of OpenAI's API expect its form even here.
    failure = TwinpoolError(f"the router failed at this request ({type(error).__name__}); its log says where")
    return JSONResponse(error_body(failure), status_code=500)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = {"message": f"{request.method} {request.url.path}: {error.detail}", "type": "invalid_request_error"}
    return JSONResponse({"error": {**body, "param": None, "code": None}}, status_code=error.status_code)
