"""Decisions over frozen views."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from twinpool.router.costs import EqualCosts
from twinpool.router.line_fit import Line
from twinpool.router.messages import LinkReport, Report, WorkerInfo
from twinpool.router.policy import Cause, NoRoute, Obstacle, Route, RouteQuery, WorkerView, choose

COST = EqualCosts()


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
    assert names(route(workers, mode="auto", num_tokens=1000)) == ("decode-0", "prefill-0")
    assert names(route(workers, mode="auto", num_tokens=16)) == ("decode-0", None)
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
    assert refused.message.startswith("every decode worker is draining")
    nobody = route([draining, decode])
    assert isinstance(nobody, NoRoute)
    assert nobody.message.startswith("every prefill worker is draining")
    none_here = route([P0])
    assert isinstance(none_here, NoRoute)
    assert none_here.message.startswith("no decode worker is connected")


def test_least_queued_prefill_and_least_loaded_decode() -> None:
    busy = replace(P0, report=Report(free_blocks=100, queued_tokens=500))
    links = (P0, P1)
    workers = [busy, P1, view("decode", 0, links, running=3), view("decode", 1, links, running=1)]
    assert names(route(workers)) == ("decode-1", "prefill-1")


def test_a_cached_prefix_is_worth_the_time_of_its_tokens() -> None:
    """Affinity draws a request until the queue costs more than its tokens do, to itself and to whoever comes next."""
    decode = view("decode", 0, (P0, P1))
    cached = {"prefill-0": 50}  # 800 tokens

    def with_queue(tokens: int) -> tuple[str, str | None]:
        busy = replace(P0, report=Report(free_blocks=100, queued_tokens=tokens))
        return names(route([busy, P1, decode], num_tokens=1000, cached_blocks=cached))

    assert with_queue(0) == ("decode-0", "prefill-0")
    assert with_queue(1500) == ("decode-0", "prefill-0")
    assert with_queue(1700) == ("decode-0", "prefill-1")


def test_decode_that_has_the_prefix_reads_less() -> None:
    slow = replace(COST, handover_line=Line(0.01, 1e-3))
    decoders = [view("decode", 0, (P0,)), view("decode", 1, (P0,))]
    query = RouteQuery(1000, "always", cached_blocks={"decode-1": 40})
    assert names(choose(query, [P0, *decoders], slow)) == ("decode-1", "prefill-0")
    loaded = [decoders[0], view("decode", 1, (P0,), running=7)]
    assert names(choose(query, [P0, *loaded], slow)) == ("decode-1", "prefill-0")
    assert names(choose(query, [P0, *loaded], COST)) == ("decode-0", "prefill-0")


def test_an_idle_worker_is_used_although_a_batch_seems_to_cost_nothing() -> None:
    flat = EqualCosts(pace_line=Line(0.001, 0.0))
    busy, idle = view("decode", 0, (P0,), running=4), view("decode", 1, (P0,))
    query = RouteQuery(num_tokens=100, mode="always", answer_tokens=60, cached_blocks={"decode-0": 6})
    assert names(choose(query, [P0, busy, idle], flat)) == ("decode-1", "prefill-0")
    resting = view("decode", 0, (P0,))
    assert names(choose(query, [P0, resting, idle], flat)) == ("decode-0", "prefill-0")


def test_new_prompts_go_where_they_push_out_nothing() -> None:
    decode = view("decode", 0, (P0, P1))
    full = replace(P0, cached_blocks=100)
    assert names(route([full, P1, decode], num_tokens=500)) == ("decode-0", "prefill-1")
    assert names(route([P0, P1, decode], num_tokens=500)) == ("decode-0", "prefill-0")


def test_auto_weighs_the_queue_of_prefill_against_the_pace_of_decode() -> None:
    idle, busy = P0, replace(P0, report=Report(free_blocks=100, queued_tokens=3000))
    quiet, crowded = view("decode", 0, (P0,)), view("decode", 0, (P0,), running=7)
    ask = {"mode": "auto", "num_tokens": 1000}
    assert names(route([idle, quiet], **ask)) == ("decode-0", "prefill-0")
    assert names(route([busy, quiet], **ask)) == ("decode-0", None)
    assert names(route([replace(busy, report=Report(free_blocks=100, queued_tokens=1000)), crowded], **ask))[1]
    cached = {"decode-0": 60}  # decode has nearly all of it: nothing is read and little is computed
    decision = route([idle, quiet], **ask, cached_blocks=cached)
    assert names(decision) == ("decode-0", None)
    assert isinstance(decision, Route)
    assert decision.cause is Cause.CHEAPER
    assert decision.compute_tokens == 1000 - 960
    assert "40 of 1000 tokens" in decision.reason


def test_auto_never_takes_what_a_filter_excludes() -> None:
    """However cheap the pair would be: barred, draining, unlinked or unlike workers are not in the comparison."""
    free = replace(COST, handover_line=Line(0.0, 0.0), prefill_line=Line(0.0, 1.0))
    query = RouteQuery(1000, "auto")
    assert names(choose(query, [P0, view("decode", 0, (P0,))], free))[1] == "prefill-0"
    draining = replace(P0, report=Report(free_blocks=100, draining=True))
    for workers in (
        [draining, view("decode", 0, (P0,))],
        [P0, view("decode", 0)],
        [P0, view("decode", 0, (P0,), info={"revision": "r2"})],
        [view("prefill", 0, info={"num_blocks": 10}), view("decode", 0, (P0,))],
    ):
        decision = choose(query, workers, free)
        assert names(decision)[1] is None
        assert isinstance(decision, Route)
        assert decision.cause is Cause.NO_PREFILL
    barred = replace(query, barred=frozenset({P0.key}))
    assert names(choose(barred, [P0, view("decode", 0, (P0,))], free))[1] is None


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
