"""What a request would cost on a worker, in estimated seconds; pure functions of a query, a view and the costs.

- *Prefill*: the tokens ahead and those of the prompt that are not cached, at the worker's measured pace.
- *Burden*: computing them keeps the next request waiting as long, and what new blocks push out of the cache is
  computed again as often as prompts are found in caches. So a token that need not be computed is worth more than a
  token of queue.
- *Interference*: a prompt that decode computes itself delays each answer that runs there by the time of its tokens.
  A router's decision also meets answers that start later, so one is assumed where none runs.
- *Hand-over*: the wait for the copy after the prefill, for the tokens that decode lacks.
- *Decode*: the answer's own tokens at the pace of the batch it joins, and the delay it is to the others there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from twinpool.router.costs import Costs, WorkerKey
from twinpool.router.worker_view import WorkerView

Mode = Literal["always", "auto", "never"]

LEAST_SHARE = 0.01
"""What a stream more costs a batch at least, as a share of an empty batch's step: measured differences drown in noise,
and workers that idle while others are busy serve nobody."""


@dataclass(frozen=True, slots=True)
class RouteQuery:
    """What is asked.

    ``num_tokens`` is prompt plus output known so far, ``answer_tokens`` the most that may still come, ``cached_blocks``
    how many leading blocks of it each worker id is believed to cache. ``pace_weight`` is what a second that running
    answers lose counts against a second before the first token.

    ``avoid`` holds workers that failed this request; they are used only when no other is left. ``barred`` holds
    workers that must not be used. ``is_retry`` lets decode compute the prompt although the mode is ``always``.
    ``revision`` is that of the model which has begun the answer: no other may go on with it.
    """

    num_tokens: int
    mode: Mode
    avoid: frozenset[WorkerKey] = frozenset()
    barred: frozenset[WorkerKey] = frozenset()
    is_retry: bool = False
    answer_tokens: int = 1 << 30
    cached_blocks: Mapping[str, int] = field(default_factory=dict)
    pace_weight: float = 0.25
    revision: str | None = None


def cached_tokens(view: WorkerView, query: RouteQuery, most: int) -> int:
    """Tokens of the prompt in the worker's cache, in full blocks, of the first ``most``."""
    size = max(view.info.block_size, 1)
    return min(query.cached_blocks.get(view.info.worker_id, 0), most // size) * size


def to_compute(view: WorkerView, query: RouteQuery) -> int:
    """Tokens that the worker would compute: at least one, because a token must be sampled."""
    return query.num_tokens - cached_tokens(view, query, query.num_tokens - 1)


def to_read(view: WorkerView, query: RouteQuery) -> int:
    """Tokens that a decode worker would read from a prefill worker."""
    return query.num_tokens - cached_tokens(view, query, query.num_tokens)


def is_short(view: WorkerView, query: RouteQuery) -> bool:
    """Whether the request would wait for blocks."""
    cached = query.cached_blocks.get(view.info.worker_id, 0)
    needed = view.blocks_for(query.num_tokens + view.sent_kv_tokens) - cached
    return needed > view.report.free_blocks


def prefill_s(view: WorkerView, query: RouteQuery, costs: Costs) -> float:
    """Seconds until the worker has computed the prompt's first token."""
    new = to_compute(view, query)
    line = costs.prefill(view.key)
    return line.at(view.queued_tokens + new)


def burden_s(view: WorkerView, query: RouteQuery, costs: Costs) -> float:
    """Seconds that later requests lose: the one that comes next waits, and pushed out blocks are computed again."""
    new = to_compute(view, query)
    blocks = view.blocks_for(new)
    lost = min(max(view.cached_blocks + blocks - view.info.num_blocks, 0), blocks) * view.info.block_size
    return costs.prefill(view.key).per_unit_s * (new + lost * costs.reuse)


def interference_s(view: WorkerView, query: RouteQuery, costs: Costs) -> float:
    """Weighted seconds that the answers of a decode worker lose when it computes the prompt."""
    lost = costs.prefill(view.key).per_unit_s * to_compute(view, query)
    return query.pace_weight * max(view.streams, 1) * lost


def decode_s(view: WorkerView, query: RouteQuery, costs: Costs) -> float:
    """Seconds of the answer and, for every answer there, the delay that one more in the batch is."""
    line = costs.pace(view.key)
    per_stream_s = max(line.per_unit_s, LEAST_SHARE * line.fixed_s)
    tokens = min(query.answer_tokens, costs.answer_tokens)
    return tokens * (line.fixed_s + (2 * view.streams + 1) * per_stream_s)


def handover_s(prefill: WorkerView, decode: WorkerView, query: RouteQuery, costs: Costs) -> float:
    """Seconds between the prefill and the confirmed copy; reads under way share the decode worker's link."""
    line = costs.handover(prefill.key, decode.key)
    return line.at(to_read(decode, query) * (1 + decode.report.loading))
