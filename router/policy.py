"""Which workers serve a request: pure functions over frozen views of the workers and what they cost.

``choose`` filters (role, alive, model, not draining, large enough, equal layout and revision, linked), scores what is
left in estimated seconds (``scoring``), and picks a prefill and a decode worker together, or a decode worker alone,
with a reason for people. It reads no clock and no global, so every decision can be replayed, and a simulator runs the
same code. Workers that are suspect or would make the request wait for blocks come after all others.

``auto`` takes the cheaper of the best pair and the best decode worker alone; both have passed the same filters.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from twinpool.router.costs import Costs, WorkerKey
from twinpool.router.scoring import (
    Mode,
    RouteQuery,
    burden_s,
    decode_s,
    handover_s,
    interference_s,
    is_short,
    prefill_s,
    to_compute,
    to_read,
)
from twinpool.router.worker_view import WorkerView, incompatibility

__all__ = [
    "FINAL",
    "Cause",
    "Mode",
    "NoRoute",
    "Obstacle",
    "Route",
    "RouteQuery",
    "WorkerKey",
    "WorkerView",
    "choose",
    "incompatibility",
]

_MOST_OF_A_ROLE = 8
"""Decode workers, cheapest first, and prefill workers linked to each, that are compared: choosing stays linear."""


class Cause(enum.Enum):
    """Why a route was taken, for metrics."""

    CONFIGURED = "configured"
    CHEAPER = "cheaper"
    NO_PREFILL = "no_prefill_worker"
    RETRY = "retry"


@dataclass(frozen=True, slots=True)
class Route:
    """A decision: ``prefill`` is None when the decode worker computes the prompt itself.

    The estimates that it rests on, to be compared with what happens: ``compute_tokens`` for the worker that computes
    the prompt, ``ahead_tokens`` before them, ``read_tokens`` and ``streams`` (others) on the decode worker.
    """

    decode: WorkerKey
    prefill: WorkerKey | None
    reason: str
    cause: Cause
    compute_tokens: int
    ahead_tokens: int
    read_tokens: int
    streams: int
    first_s: float
    """Estimated seconds until the answer flows."""
    revision: str
    """Of the model."""


class Obstacle(enum.Enum):
    """Why there is no route."""

    NO_WORKER = "no_worker"
    NO_LINK = "no_link"
    TOO_LARGE = "too_large"
    BARRED = "barred"
    REVISION = "revision"


FINAL = (Obstacle.TOO_LARGE, Obstacle.REVISION)
"""Waiting does not help."""


@dataclass(frozen=True, slots=True)
class NoRoute:
    """No pair can serve the request now; ``message`` says why and what to do."""

    obstacle: Obstacle
    message: str


@dataclass(frozen=True, slots=True)
class _Score:
    """Workers and what they would cost; ``tier`` is (suspect, waits for blocks) of the worse of them."""

    decode: WorkerView
    prefill: WorkerView | None
    tier: tuple[bool, bool]
    first_s: float
    """Until the answer flows: first token and copy."""
    seconds: float
    """Everything."""

    @property
    def rank(self) -> tuple[tuple[bool, bool], float, str, str]:
        """Smaller is better; names decide between equals, the same way everywhere."""
        prefill = "" if self.prefill is None else self.prefill.info.worker_id
        return self.tier, self.seconds, prefill, self.decode.info.worker_id


def choose(query: RouteQuery, workers: Sequence[WorkerView], costs: Costs) -> Route | NoRoute:
    """Picks the workers for one attempt.

    ``workers`` are the connected ones of the request's model. Mutates nothing.
    """
    usable = [view for view in workers if not view.report.draining]
    decoders = [view for view in usable if view.info.role == "decode"]
    if query.revision is not None:
        usable = [view for view in usable if view.info.revision == query.revision]
        others, decoders = decoders, [view for view in decoders if view.info.revision == query.revision]
        if others and not decoders:
            return NoRoute(
                Obstacle.REVISION,
                f"revision {query.revision[:12]} of the model, which began this answer, is not served any more; "
                "ask again",
            )
    if not decoders:
        return NoRoute(Obstacle.NO_WORKER, _no_worker("decode", workers))
    fitting = [view for view in decoders if view.blocks_for(query.num_tokens) <= view.info.num_blocks]
    if not fitting:
        most = max(view.info.num_blocks * view.info.block_size for view in decoders)
        return NoRoute(
            Obstacle.TOO_LARGE,
            f"{query.num_tokens} tokens do not fit the KV memory of any decode worker (at most {most}); "
            "shorten the prompt or raise decode.engine.num_blocks",
        )
    decoders = _without(fitting, query)
    if not decoders:
        return NoRoute(Obstacle.BARRED, "every decode worker is out of capacity")
    if query.mode == "never":
        return _route(_best_alone(decoders, query, costs), query, "disaggregate: never", Cause.CONFIGURED)
    prefills = [
        view
        for view in usable
        if view.info.role == "prefill" and view.blocks_for(query.num_tokens) <= view.info.num_blocks
    ]
    admitted = _without(prefills, query)
    pair = _best_pair(admitted, decoders, query, costs)
    if query.mode == "auto":
        return _cheaper(_best_alone(decoders, query, costs), pair, query)
    if pair is not None:
        return _route(pair, query, "disaggregate: always", Cause.CONFIGURED)
    if query.is_retry:
        reason = "disaggregate: always, but no linked prefill worker is left: decode recomputes"
        return _route(_best_alone(decoders, query, costs), query, reason, Cause.RETRY)
    if prefills and not admitted:
        return NoRoute(Obstacle.BARRED, "every prefill worker is out of capacity")
    if not any(view.info.role == "prefill" for view in usable):
        message = f"{_no_worker('prefill', workers)}, or set router.disaggregate: auto, which goes without"
        return NoRoute(Obstacle.NO_LINK, message)
    return NoRoute(
        Obstacle.NO_LINK,
        "no decode worker is linked to a usable prefill worker (twinpool status says why); "
        "with router.disaggregate: auto decode workers would compute prompts themselves",
    )


def _no_worker(role: Literal["prefill", "decode"], workers: Sequence[WorkerView]) -> str:
    """Why no worker of ``role`` takes requests, and what to do."""
    if any(view.info.role == role for view in workers):
        return f"every {role} worker is draining; start another one, or take it back (twinpool drain --undo)"
    return f"no {role} worker is connected; start one or wait for it (twinpool status)"


def _cheaper(alone: _Score, pair: _Score | None, query: RouteQuery) -> Route:
    if pair is None or pair.prefill is None:
        reason = "disaggregate: auto, no linked prefill worker can take it now"
        return _route(alone, query, reason, Cause.NO_PREFILL)
    best, other = (alone, pair) if alone.rank < pair.rank else (pair, alone)
    computes = best.prefill or best.decode
    saved = "the other has no room"
    if best.tier == other.tier:
        saved = f"saves {other.seconds - best.seconds:.3f} s, the waits of others and the answer's pace included"
    reason = (
        f"disaggregate: auto, {computes.info.worker_id} computes {to_compute(computes, query)} of {query.num_tokens} "
        f"tokens: {saved} (the answer flows after {alone.first_s:.3f} s from decode alone, {pair.first_s:.3f} s from "
        f"{pair.prefill.info.worker_id})"
    )
    return _route(best, query, reason, Cause.CHEAPER)


def _route(score: _Score, query: RouteQuery, reason: str, cause: Cause) -> Route:
    computes = score.prefill or score.decode
    return Route(
        decode=score.decode.key,
        prefill=None if score.prefill is None else score.prefill.key,
        reason=reason,
        cause=cause,
        compute_tokens=to_compute(computes, query),
        ahead_tokens=computes.queued_tokens,
        read_tokens=0 if score.prefill is None else to_read(score.decode, query),
        streams=score.decode.streams,
        first_s=score.first_s,
        revision=score.decode.info.revision,
    )


def _without(views: Sequence[WorkerView], query: RouteQuery) -> list[WorkerView]:
    """Drops barred workers, and those to avoid while others are left."""
    allowed = [view for view in views if view.key not in query.barred]
    return [view for view in allowed if view.key not in query.avoid] or allowed


def _best_alone(decoders: Sequence[WorkerView], query: RouteQuery, costs: Costs) -> _Score:
    scores = []
    for view in decoders:
        first_s = prefill_s(view, query, costs)
        seconds = (
            first_s + burden_s(view, query, costs) + interference_s(view, query, costs) + decode_s(view, query, costs)
        )
        scores.append(_Score(view, None, (view.suspect, is_short(view, query)), first_s, seconds))
    return min(scores, key=lambda score: score.rank)


def _best_pair(
    prefills: Sequence[WorkerView], decoders: Sequence[WorkerView], query: RouteQuery, costs: Costs
) -> _Score | None:
    firsts = []
    for view in prefills:
        first_s, waits = prefill_s(view, query, costs), is_short(view, query)
        later_s = burden_s(view, query, costs)
        firsts.append((view.suspect, waits, first_s + later_s, view.info.worker_id, first_s, view))
    firsts.sort(key=lambda first: first[:4])
    lasts = [
        (view.suspect, is_short(view, query), decode_s(view, query, costs), view.info.worker_id, view)
        for view in decoders
    ]
    lasts.sort(key=lambda last: last[:4])
    best: _Score | None = None
    seen = 0
    for suspect, short, answer_s, _, decode in lasts:
        linked = {(link.worker_id, link.epoch) for link in decode.report.links if link.linked}
        pairs = (first for first in firsts if first[-1].key in linked and _alike(first[-1], decode))
        taken = list(islice(pairs, _MOST_OF_A_ROLE))
        for gone, waits, seconds, _, first_s, prefill in taken:
            copy_s = handover_s(prefill, decode, query, costs)
            tier = (suspect or gone, short or waits)
            score = _Score(decode, prefill, tier, first_s + copy_s, seconds + copy_s + answer_s)
            if best is None or score.rank < best.rank:
                best = score
        seen += bool(taken)
        if seen == _MOST_OF_A_ROLE:
            break
    return best


def _alike(prefill: WorkerView, decode: WorkerView) -> bool:
    return incompatibility(prefill.info, decode.info) is None
