"""Which workers serve a request: pure functions over frozen views of the workers.

``choose`` filters (role, alive, model, not draining, large enough, equal layout and revision, linked), scores what is
left (queued tokens, load, free blocks, cached prefix) and picks a prefill and a decode worker together, or a decode
worker alone, with a reason for people. It reads no clock and no global, so every decision can be replayed in a test.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from twinpool.router.messages import LinkReport, Report, WorkerInfo

Mode = Literal["always", "auto", "never"]
WorkerKey = tuple[str, int]
"""Identity and epoch: a restarted worker is another worker."""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A connected worker at one moment; ``sent_*`` count what was dispatched since its report."""

    info: WorkerInfo
    report: Report
    suspect: bool = False
    sent_requests: int = 0
    sent_tokens: int = 0

    @property
    def key(self) -> WorkerKey:
        """Identity and epoch."""
        return self.info.worker_id, self.info.epoch

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens ahead of a new request."""
        return self.report.queued_tokens + self.sent_tokens

    @property
    def load(self) -> float:
        """Requests as a share of the largest batch."""
        report = self.report
        busy = report.running + report.waiting + report.loading + self.sent_requests
        return busy / max(self.info.max_num_seqs, 1)


@dataclass(frozen=True, slots=True)
class CostModel:
    """What the choice between the pools rests on.

    Prompts shorter than ``break_even_tokens`` are computed by the decode worker: for them the hand-over costs more
    than the disturbance of the running batch.
    """

    break_even_tokens: int = 64


@dataclass(frozen=True, slots=True)
class RouteQuery:
    """What is asked: ``num_tokens`` is prompt plus output known so far; ``cached_tokens`` is a hint per worker id.

    ``avoid`` holds workers that failed this request; they are used only when no other is left. ``barred`` holds
    workers that must not be used. ``is_retry`` lets decode compute the prompt although the mode is ``always``.
    """

    num_tokens: int
    mode: Mode
    avoid: frozenset[WorkerKey] = frozenset()
    barred: frozenset[WorkerKey] = frozenset()
    is_retry: bool = False
    cached_tokens: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Route:
    """A decision: ``prefill`` is None when the decode worker computes the prompt itself."""

    decode: WorkerKey
    prefill: WorkerKey | None
    reason: str


class Obstacle(enum.Enum):
    """Why there is no route."""

    NO_WORKER = "no_worker"
    NO_LINK = "no_link"
    TOO_LARGE = "too_large"
    BARRED = "barred"


@dataclass(frozen=True, slots=True)
class NoRoute:
    """No pair can serve the request now; ``message`` says why and what to do."""

    obstacle: Obstacle
    message: str


def incompatibility(prefill: WorkerInfo, decode: WorkerInfo) -> str | None:
    """Why two workers must never exchange KV, with both values; None when they may."""
    if prefill.revision != decode.revision:
        return (
            f"model revision differs: {prefill.worker_id} has {prefill.revision}, "
            f"{decode.worker_id} has {decode.revision}"
        )
    if prefill.layout != decode.layout:
        return (
            f"KV layout differs: {prefill.worker_id} has {prefill.layout_text or prefill.layout}, "
            f"{decode.worker_id} has {decode.layout_text or decode.layout}"
        )
    return None


def link_between(prefill: WorkerView, decode: WorkerView) -> LinkReport | None:
    """The working link of a pair, or None."""
    if incompatibility(prefill.info, decode.info) is not None:
        return None
    for link in decode.report.links:
        if link.linked and link.worker_id == prefill.info.worker_id and link.epoch == prefill.info.epoch:
            return link
    return None


def blocks_needed(num_tokens: int, info: WorkerInfo) -> int:
    """Blocks that hold ``num_tokens``."""
    return -(-num_tokens // max(info.block_size, 1))


def choose(query: RouteQuery, workers: Sequence[WorkerView], cost: CostModel) -> Route | NoRoute:
    """Picks the workers for one attempt.

    ``workers`` are the connected ones of the request's model. Mutates nothing.
    """
    usable = [view for view in workers if not view.report.draining]
    decoders = [view for view in usable if view.info.role == "decode"]
    if not decoders:
        return NoRoute(Obstacle.NO_WORKER, "no decode worker is connected; start one or wait for it (twinpool status)")
    fitting = [view for view in decoders if blocks_needed(query.num_tokens, view.info) <= view.info.num_blocks]
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
        return Route(_best_decode(decoders, query).key, None, "disaggregate: never")
    if query.mode == "auto" and query.num_tokens < cost.break_even_tokens:
        reason = f"disaggregate: auto, {query.num_tokens} tokens are below break-even ({cost.break_even_tokens})"
        return Route(_best_decode(decoders, query).key, None, reason)
    return _choose_pair(query, usable, decoders)


def _choose_pair(query: RouteQuery, usable: Sequence[WorkerView], decoders: Sequence[WorkerView]) -> Route | NoRoute:
    prefills = [
        view
        for view in usable
        if view.info.role == "prefill" and blocks_needed(query.num_tokens, view.info) <= view.info.num_blocks
    ]
    admitted = _without(prefills, query)
    linked = {
        decode.key: [prefill for prefill in admitted if link_between(prefill, decode) is not None]
        for decode in decoders
    }
    candidates = [decode for decode in decoders if linked[decode.key]]
    if candidates:
        decode = _best_decode(candidates, query)
        prefill = min(linked[decode.key], key=lambda view: _prefill_score(view, query))
        return Route(decode.key, prefill.key, f"disaggregate: {query.mode}")
    if query.mode == "auto":
        return Route(
            _best_decode(decoders, query).key, None, "disaggregate: auto, no linked prefill worker can take it now"
        )
    if query.is_retry:
        reason = "disaggregate: always, but no linked prefill worker is left: decode recomputes"
        return Route(_best_decode(decoders, query).key, None, reason)
    if prefills and not admitted:
        return NoRoute(Obstacle.BARRED, "every prefill worker is out of capacity")
    return NoRoute(
        Obstacle.NO_LINK,
        "no decode worker is linked to a usable prefill worker (twinpool status says why); "
        "with router.disaggregate: auto decode workers would compute prompts themselves",
    )


def _without(views: Sequence[WorkerView], query: RouteQuery) -> list[WorkerView]:
    """Drops barred workers, and those to avoid while others are left."""
    allowed = [view for view in views if view.key not in query.barred]
    return [view for view in allowed if view.key not in query.avoid] or allowed


def _best_decode(views: Sequence[WorkerView], query: RouteQuery) -> WorkerView:
    return min(views, key=lambda view: _decode_score(view, query))


def _decode_score(view: WorkerView, query: RouteQuery) -> tuple[bool, bool, float, float, str]:
    """Smaller is better: alive, has room now, load, share of blocks in use, name."""
    short = blocks_needed(query.num_tokens + view.sent_tokens, view.info) > view.report.free_blocks
    cached = query.cached_tokens.get(view.info.worker_id, 0) / max(query.num_tokens, 1)
    used = 1 - view.report.free_blocks / max(view.info.num_blocks, 1)
    return view.suspect, short, view.load - cached, used, view.info.worker_id


def _prefill_score(view: WorkerView, query: RouteQuery) -> tuple[bool, int, int, str]:
    """Smaller is better: alive, tokens to compute before the first one is out, requests held, name."""
    ahead = view.queued_tokens - query.cached_tokens.get(view.info.worker_id, 0)
    return view.suspect, ahead, view.report.held + view.sent_requests, view.info.worker_id
