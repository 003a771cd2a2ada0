"""Runs the flows of one HTTP request (one per prompt) and puts their answers into OpenAI's form.

``Completion.open`` admits every prompt before any is dispatched; ``whole`` or ``events`` reads the flows to the end.
Leaving either early, or ``close``, ends them all.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from twinpool.errors import Cancelled
from twinpool.proto import inference_pb2
from twinpool.router.caller import Caller
from twinpool.router.chunk import Chunk
from twinpool.router.flow import Flow
from twinpool.router.intake import Intake
from twinpool.router.openai_format import Answer, Envelope, Format, Json, extension, running_usage, usage
from twinpool.router.openai_types import StreamOptions
from twinpool.router.summary import Summary


class Completion:
    """See the module docstring."""

    def __init__(self, flows: Sequence[Flow], form: Format) -> None:
        self._flows = flows
        self._form = form
        self._n = flows[0].request.n
        first = flows[0].request
        self._envelope = Envelope(form, first.request_id, first.model)

    @classmethod
    async def open(
        cls,
        intake: Intake,
        requests: Sequence[inference_pb2.GenerateRequest],
        caller: Caller,
        make_format: Callable[[Sequence[Flow]], Format],
        traceparent: str,
    ) -> Completion:
        """Admits and validates all prompts.

        Raises:
            TwinpoolError: one of them was refused; none was started.
        """
        flows: list[Flow] = []
        try:
            for request in requests:
                flows.append(await intake.open(request, caller, traceparent=traceparent))
            return cls(flows, make_format(flows))
        except BaseException:
            _cancel(flows)
            raise

    async def whole(self) -> Json:
        """The answer as one object."""
        answers: dict[int, Answer] = {}
        summaries: dict[int, Summary] = {}
        async with aclosing(self._chunks()) as chunks:
            async for number, chunk in chunks:
                index = number * self._n + chunk.index
                answers.setdefault(index, Answer(index)).add(chunk)
                if chunk.summary is not None:
                    summaries[number] = chunk.summary
        ordered = [summary for _, summary in sorted(summaries.items())]
        return self._envelope.whole([answer for _, answer in sorted(answers.items())], ordered)

    async def events(self, options: StreamOptions) -> AsyncGenerator[Json, None]:
        """The answer as stream events; nothing is sent before a choice has something to show."""
        waiting: dict[int, Answer] = {}
        started: set[int] = set()
        summaries: dict[int, Summary] = {}
        prompt_tokens = sum(len(flow.request.prompt_ids) for flow in self._flows)
        completion_tokens = 0
        async with aclosing(self._chunks()) as chunks:
            async for number, chunk in chunks:
                index = number * self._n + chunk.index
                piece = waiting.setdefault(index, Answer(index))
                piece.add(chunk)
                completion_tokens += len(chunk.token_ids)
                extra: Json = {}
                if options.continuous_usage_stats:
                    extra["usage"] = running_usage(prompt_tokens, completion_tokens)
                if chunk.summary is not None:
                    summaries[number] = chunk.summary
                    if len(summaries) == len(self._flows) and not options.include_usage:
                        extra["twinpool"] = extension([summary for _, summary in sorted(summaries.items())])
                if piece.text or piece.logprobs or piece.finish is not None:
                    del waiting[index]
                    delta = self._form.delta(piece, index not in started)
                    if delta is not None:
                        yield self._envelope.event([delta], **extra)
                        started.add(index)
        if options.include_usage:
            ordered = [summary for _, summary in sorted(summaries.items())]
            yield self._envelope.event([], usage=usage(ordered), twinpool=extension(ordered))

    def close(self) -> None:
        """Ends all flows that have not ended. Idempotent."""
        _cancel(self._flows)

    async def _chunks(self) -> AsyncGenerator[tuple[int, Chunk], None]:
        """Chunks of all flows as they come, with the number of the prompt."""
        if len(self._flows) == 1:
            async with aclosing(self._flows[0].chunks()) as only:
                async for chunk in only:
                    yield 0, chunk
            return
        sources = [flow.chunks() for flow in self._flows]
        nexts: dict[asyncio.Future[Chunk], int] = {}
        try:
            for number, source in enumerate(sources):
                nexts[asyncio.ensure_future(anext(source))] = number
            while nexts:
                done, _ = await asyncio.wait(nexts, return_when=asyncio.FIRST_COMPLETED)
                for future in done:
                    number = nexts.pop(future)
                    try:
                        chunk = future.result()
                    except StopAsyncIteration:
                        continue
                    yield number, chunk
                    nexts[asyncio.ensure_future(anext(sources[number]))] = number
        finally:
            self.close()
            for future in nexts:
                future.cancel()
            await asyncio.gather(*nexts, return_exceptions=True)
            for source in sources:
                await source.aclose()


def _cancel(flows: Sequence[Flow]) -> None:
    for flow in flows:
        flow.cancel(Cancelled("the client cancelled"))
