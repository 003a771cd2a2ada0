"""Traces of requests: what is usual, what is suspect, what is kept, what OpenTelemetry gets."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from twinpool import AsyncClient
from twinpool.errors import NotFound
from twinpool.router.summary import Summary, Timings, Usage
from twinpool.router.telemetry import NoExporter, OtelExporter, make_exporter
from twinpool.router.trace import Stage, TraceBook, suspect

USAGE = Usage(prompt_tokens=100, completion_tokens=11, remote_tokens=100, prefill_computed_tokens=100)
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def summary(slow: str = "", by: float = 0.3) -> Summary:
    seconds = {"admission_s": 0.01, "queue_s": 0.02, "prefill_s": 0.5, "exposed_transfer_s": 0.005, "schedule_s": 0.002}
    seconds |= {"transfer_s": 0.3, "decode_s": 1.0, "first_token_s": 0.52, "total_s": 1.53}
    if slow:
        seconds[slow] += by
    return Summary(USAGE, Timings(**seconds), "prefill-0", "decode-0")


@pytest.mark.parametrize(
    ("slow", "stage"),
    [
        ("queue_s", Stage.PREFILL_QUEUE),
        ("prefill_s", Stage.PREFILL),
        ("exposed_transfer_s", Stage.TRANSFER),
        ("schedule_s", Stage.DECODE_QUEUE),
        ("decode_s", Stage.DECODE),
    ],
)
def test_the_suspect_is_what_takes_longer_than_usual(slow: str, stage: Stage) -> None:
    book = TraceBook(100)
    for number in range(6):
        book.add(str(number), "", 0.0, 1.53, "ok", summary())
    trace = book.add("slow", "", 0.0, 2.0, "ok", summary(slow))
    guilty = suspect(book.usual(trace))
    assert guilty is not None
    assert guilty.span.stage is stage
    assert guilty.excess_s == pytest.approx(0.3, abs=0.02)


def test_a_long_prompt_is_not_suspect_for_being_long() -> None:
    book = TraceBook(100)
    for number in range(6):
        book.add(str(number), "", 0.0, 1.53, "ok", summary())
    long = Summary(Usage(prompt_tokens=1000, completion_tokens=11, prefill_computed_tokens=1000), Timings(
        queue_s=0.2, prefill_s=5.0, exposed_transfer_s=0.005, schedule_s=0.002, transfer_s=0.3, decode_s=1.0
    ), "prefill-0", "decode-0")  # fmt: skip
    guilty = suspect(book.usual(book.add("long", "", 0.0, 6.0, "ok", long)))
    assert guilty is not None
    assert guilty.span.stage is Stage.PREFILL_QUEUE


def test_the_book_forgets_and_logs(caplog: pytest.LogCaptureFixture) -> None:
    book = TraceBook(2)
    with caplog.at_level(logging.DEBUG, "twinpool.router.trace"):
        for name in "abc":
            book.add(name, "", 0.0, 1.0, "unavailable", None)
        book.add("d", "", 0.0, 1.0, "cancelled", None)
    assert [book.get(name) is not None for name in "abcd"] == [False, False, True, True]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3 + ["DEBUG"]
    assert caplog.records[0].__dict__["request_id"] == "a"


async def test_a_request_can_be_traced(make_cluster: Any) -> None:
    async with make_cluster("hello world") as cluster:
        await cluster.router.wait_ready()
        async with AsyncClient(f"127.0.0.1:{cluster.router.grpc_port}") as client:
            answer = await client.generate("hi", request_id="mine")
            assert answer.request_id == "mine"
            trace = await client.trace("mine")
            assert trace.outcome == "ok"
            assert [stage.name for stage in trace.stages][:3] == ["router queue", "prefill queue", "prefill"]
            assert trace.stages[2].worker == "prefill-0"
            for name in ("chatcmpl-mine", "cmpl-mine"):  # as answers over HTTP call it
                assert (await client.trace(name)).request_id == "mine"
            with pytest.raises(NotFound, match="kept_traces"):
                await client.trace("nobody's")


def test_opentelemetry_gets_a_span_per_stage() -> None:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    memory = InMemorySpanExporter()
    exporter = OtelExporter(memory)
    book = TraceBook(10)
    exporter.export(book.add("mine", PARENT, 10.0, 11.53, "ok", summary()))
    exporter.export(book.add("bad", "nonsense", 10.0, 11.0, "unavailable", None))
    exporter.close()
    spans = {span.name: span for span in memory.get_finished_spans() if span.attributes.get("twinpool.worker")}
    roots = [span for span in memory.get_finished_spans() if span.name == "generate"]
    assert set(spans) == {stage.value for stage in Stage}
    good = next(span for span in roots if span.attributes["twinpool.request_id"] == "mine")
    assert f"{good.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{good.parent.span_id:016x}" == PARENT.split("-")[2]
    assert all(span.parent.span_id == good.context.span_id for span in spans.values())
    prefill = spans["prefill"]
    assert (prefill.end_time - prefill.start_time) / 1e9 == pytest.approx(0.5, abs=1e-4)
    assert good.start_time <= prefill.start_time <= prefill.end_time <= good.end_time
    assert good.attributes["gen_ai.usage.input_tokens"] == 100
    bad = next(span for span in roots if span is not good)
    assert not bad.status.is_ok
    assert bad.parent is None


def test_without_an_endpoint_nothing_is_exported() -> None:
    assert isinstance(make_exporter(None), NoExporter)
