"""The figures of a load test.

- TTFT: from sending to the first piece. TPOT: from the first piece to the last, divided by the tokens after the first.
- gap: between two pieces of one answer, all answers together (one piece may carry several tokens).
- goodput: requests per second that met every objective that was given (TTFT, TPOT, end to end; at most the value).
  Answers of one token have a TPOT of 0. Failed requests are not good.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from twinpool.bench.target import Timeline

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Objectives:
    """Limits in milliseconds; None is no objective."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    @property
    def given(self) -> dict[str, float]:
        """Those that are set."""
        return {name: limit for name, limit in asdict(self).items() if limit is not None}


@dataclass(frozen=True, slots=True)
class Served:
    """What an answered request saw, in milliseconds."""

    sent: float
    ttft_ms: float
    tpot_ms: float
    e2e_ms: float
    gaps_ms: tuple[float, ...]
    tokens: int

    @classmethod
    def of(cls, timeline: Timeline) -> Served:
        """From a timeline with at least one piece."""
        first, last = timeline.pieces[0], timeline.pieces[-1]
        gaps = [b - a for a, b in zip(timeline.pieces, timeline.pieces[1:], strict=False)]
        return cls(
            sent=timeline.sent,
            ttft_ms=1e3 * (first - timeline.sent),
            tpot_ms=1e3 * (last - first) / (timeline.tokens - 1) if timeline.tokens > 1 else 0.0,
            e2e_ms=1e3 * (last - timeline.sent),
            gaps_ms=tuple(1e3 * gap for gap in gaps),
            tokens=timeline.tokens,
        )


def served(timelines: Sequence[Timeline]) -> list[Served]:
    """The answered ones."""
    return [Served.of(timeline) for timeline in timelines if timeline.pieces and not timeline.error]


def percentile(values: Sequence[float], share: int) -> float | None:
    """The smallest value that ``share`` percent do not exceed; None of nothing."""
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, -(-share * len(ordered) // 100) - 1)], 2) if ordered else None


def report(timelines: Sequence[Timeline], objectives: Objectives) -> dict[str, Any]:
    """All figures, ready for JSON."""
    answers = served(timelines)
    seconds = max(t.ended for t in timelines) - min(t.sent for t in timelines)
    errors = Counter(
        timeline.error or "no token came" for timeline in timelines if timeline.error or not timeline.pieces
    )
    good = [answer for answer in answers if _good(answer, objectives)]

    def spread(values: Sequence[float]) -> dict[str, float | None]:
        mean = round(sum(values) / len(values), 2) if values else None
        return {"mean": mean, **{f"p{share}": percentile(values, share) for share in PERCENTILES}}

    return {
        "requests": len(timelines),
        "failed": sum(errors.values()),
        "errors": dict(errors.most_common(5)),
        "seconds": round(seconds, 2),
        "input_tokens": sum(timeline.prompt_tokens for timeline in timelines),
        "output_tokens": sum(answer.tokens for answer in answers),
        "output_tokens_per_second": round(sum(answer.tokens for answer in answers) / seconds, 1),
        "requests_per_second": round(len(answers) / seconds, 3),
        "ttft_ms": spread([answer.ttft_ms for answer in answers]),
        "tpot_ms": spread([answer.tpot_ms for answer in answers]),
        "gap_ms": spread([gap for answer in answers for gap in answer.gaps_ms]),
        "e2e_ms": spread([answer.e2e_ms for answer in answers]),
        "goodput": {
            "definition": "requests per second that met every objective",
            "objectives_ms": objectives.given,
            "requests_per_second": round(len(good) / seconds, 3),
            "share": round(len(good) / len(timelines), 4),
        },
    }


def _good(answer: Served, objectives: Objectives) -> bool:
    measured = {"ttft_ms": answer.ttft_ms, "tpot_ms": answer.tpot_ms, "e2e_ms": answer.e2e_ms}
    return all(measured[name] <= limit for name, limit in objectives.given.items())
