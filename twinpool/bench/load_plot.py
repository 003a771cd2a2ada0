"""A picture of a load test: distributions of TTFT, TPOT and gaps, and throughput against time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

from twinpool.bench.load_report import percentile, served
from twinpool.bench.target import Timeline


def plot(timelines: Sequence[Timeline], title: str, path: Path) -> None:
    """Writes a PNG. Raises OSError: it cannot be written."""
    answers = served(timelines)
    figure, axes = plt.subplots(2, 2, figsize=(11, 7), constrained_layout=True)
    figure.suptitle(title)
    series = {
        "TTFT": [answer.ttft_ms for answer in answers],
        "TPOT": [answer.tpot_ms for answer in answers],
        "gap between pieces": [gap for answer in answers for gap in answer.gaps_ms],
    }
    for axis, (name, values) in zip(axes.flat, series.items(), strict=False):
        ordered = sorted(values)
        axis.plot(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))])
        for share in (50, 99):
            value = percentile(ordered, share)
            if value is not None:
                axis.axvline(value, linestyle=":", linewidth=1, color="grey")
                axis.annotate(
                    f"p{share} {value:.0f}", (value, share / 100), textcoords="offset points", xytext=(4, -10)
                )
        axis.set(xlabel=f"{name} (ms)", ylabel="share of all", ylim=(0, 1.02))
    axis = axes.flat[3]
    began = min(timeline.sent for timeline in timelines)
    seconds = max(1, int(max(timeline.ended for timeline in timelines) - began) + 1)
    tokens = [0.0] * seconds
    for timeline in timelines:
        for piece in timeline.pieces:
            tokens[min(seconds - 1, int(piece - began))] += timeline.tokens / len(timeline.pieces)
    axis.step(range(seconds), tokens, where="post")
    axis.set(xlabel="time (s)", ylabel="output tokens per second", ylim=(0, None))
    figure.savefig(path, dpi=110)
    plt.close(figure)
