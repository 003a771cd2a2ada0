"""Decisions over frozen views."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from twinpool.router.messages import LinkReport, Report, WorkerInfo
from twinpool.router.policy import CostModel, NoRoute, Obstacle, Route, RouteQuery, WorkerView, choose

COST = CostModel(break_even_tokens=64)


def view(role: str, number: int = 0, links: tuple[WorkerView, ...] = (), info: Any = None, **report: Any) -> WorkerView:
    values = {
        "worker_id": f"{role}-{number}",
        "epoch": number + 1,
        "protocol": 1,
        "role": role,
        "model": "m",
        "revision": "r1",
        "layout": "l1",
        "layout_text": "L1",
        "block_size": 16,
        "num_blocks": 100,
        "max_model_len": 4096,
        "max_num_seqs": 8,
        "kv_address": "",
        "connector": "local",
        "vocab_size": 10,
    }
    linked = tuple(LinkReport(peer.info.worker_id, peer.info.epoch, True) for peer in links)
    load = {"free_blocks": 100, "links": linked} | report
    return WorkerView(WorkerInfo(**values | (info or {})), Report(**load))


def route(workers: list[WorkerView], **query: Any) -> Route | NoRoute:
    return choose(RouteQuery(**{"num_tokens": 100, "mode": "always"} | query), workers, COST)


def names(decision: Route | NoRoute) -> tuple[str, str | None]:
    assert isinstance(decision, Route), decision
    return decision.decode[0], None if decision.prefill is None else decision.prefill[0]


P0, P1 = view("prefill", 0), view("prefill", 1)


def test_modes() -> None:
    workers = [P0, view("decode", 0, (P0,))]
    assert names(route(workers)) == ("decode-0", "prefill-0")
    assert names(route(workers, mode="auto")) == ("decode-0", "prefill-0")
    assert names(route(workers, mode="auto", num_tokens=63)) == ("decode-0", None)
    assert names(route(workers, mode="never")) == ("decode-0", None)


@pytest.mark.parametrize(
    "decode",
    [
        view("decode", 0),
        view("decode", 0, (P1,)),
        view("decode", 0, (view("prefill", 0, info={"epoch": 99}),)),
        view("decode", 0, (P0,), info={"revision": "r2"}),
        view("decode", 0, (P0,), info={"layout": "l2"}),
    ],
    ids=["unlinked", "linked to another", "linked to its past life", "revision", "layout"],
)
def test_only_linked_equal_pairs(decode: WorkerView) -> None:
    refused = route([P0, decode])
    assert isinstance(refused, NoRoute)
    assert refused.obstacle is Obstacle.NO_LINK
    assert names(route([P0, decode], mode="auto")) == ("decode-0", None)
    retried = route([P0, decode], is_retry=True)
    assert names(retried) == ("decode-0", None)
    assert isinstance(retried, Route)
    assert "recompute" in retried.reason


def test_draining_workers_get_nothing() -> None:
    decode = view("decode", 0, (P0, P1))
    draining = replace(P0, report=Report(free_blocks=100, draining=True))
    assert names(route([draining, P1, decode])) == ("decode-0", "prefill-1")
    gone = replace(decode, report=replace(decode.report, draining=True))
    refused = route([P0, gone])
    assert isinstance(refused, NoRoute)
    assert refused.obstacle is Obstacle.NO_WORKER


def test_least_queued_prefill_and_least_loaded_decode() -> None:
    busy = replace(P0, report=Report(free_blocks=100, queued_tokens=500))
    links = (P0, P1)
    workers = [busy, P1, view("decode", 0, links, running=3), view("decode", 1, links, running=1)]
    assert names(route(workers)) == ("decode-1", "prefill-1")
    cached = route(workers, cached_tokens={"prefill-0": 600})
    assert names(cached) == ("decode-1", "prefill-0")


def test_what_was_sent_since_the_report_counts() -> None:
    links = (P0, P1)
    workers = [
        replace(P0, sent_tokens=10),
        P1,
        replace(view("decode", 0, links), sent_requests=1),
        view("decode", 1, links),
    ]
    assert names(route(workers)) == ("decode-1", "prefill-1")


def test_a_full_or_suspect_decode_worker_is_the_last_choice() -> None:
    full = view("decode", 0, (P0,), free_blocks=2)
    suspect = replace(view("decode", 1, (P0,)), suspect=True)
    assert names(route([P0, full, view("decode", 2, (P0,), running=7)])) == ("decode-2", "prefill-0")
    assert names(route([P0, full, suspect])) == ("decode-0", "prefill-0")
    assert names(route([P0, suspect])) == ("decode-1", "prefill-0")


def test_workers_to_avoid_are_used_when_nobody_else_is_left() -> None:
    a, b = view("decode", 0, (P0,)), view("decode", 1, (P0,), running=5)
    assert names(route([P0, a, b], avoid=frozenset({a.key}))) == ("decode-1", "prefill-0")
    assert names(route([P0, a], avoid=frozenset({a.key, P0.key}))) == ("decode-0", "prefill-0")


def test_barred_workers_are_never_used() -> None:
    decode = view("decode", 0, (P0, P1))
    assert names(route([P0, P1, decode], barred=frozenset({P0.key}))) == ("decode-0", "prefill-1")
    for barred in (decode.key, P0.key):
        refused = route([P0, decode], barred=frozenset({barred}))
        assert isinstance(refused, NoRoute)
        assert refused.obstacle is Obstacle.BARRED


def test_too_large_for_everybody() -> None:
    refused = route([P0, view("decode", 0, (P0,), info={"num_blocks": 6})])
    assert isinstance(refused, NoRoute)
    assert refused.obstacle is Obstacle.TOO_LARGE
    assert "100 tokens" in refused.message
    assert "96" in refused.message
