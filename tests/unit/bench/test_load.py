"""Load tests: arrivals, workloads, and figures of timelines whose figures are known."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path

import pytest

from twinpool.bench.arrivals import gamma
from twinpool.bench.load_plot import plot
from twinpool.bench.load_report import Objectives, percentile, report
from twinpool.bench.target import Timeline
from twinpool.bench.workload import HASH_BLOCK, PromptMaker, Row, made_up, read_trace
from twinpool.errors import ConfigError


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_keep_their_rate_and_are_as_bursty_as_asked(burstiness: float) -> None:
    times = gamma(4000, 8.0, burstiness, seed=1)
    assert times == sorted(times)
    assert times[0] == 0.0
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(1 / 8, rel=0.01)
    variation = statistics.stdev(gaps) / statistics.mean(gaps)
    assert variation == pytest.approx(burstiness**-0.5, rel=0.1)
    assert gamma(10, 1.0, 1.0, seed=2) != gamma(10, 1.0, 1.0, seed=3)


def test_made_up_lengths() -> None:
    assert made_up(2, 100, 10, 0.0, 0) == [Row(None, 100, 10)] * 2
    rows = made_up(300, 100, 10, 0.5, 0)
    assert min(row.input_tokens for row in rows) >= 50
    assert max(row.input_tokens for row in rows) <= 150
    assert len({row.input_tokens for row in rows}) > 50


def test_azure_rows(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:48.6805900,9000,5\n2023-11-16 18:15:50.6805900,20,0\n"
    )
    assert read_trace(path, 10, 1000, speed=2.0) == [Row(0.0, 374, 44), Row(2.0, 20, 1)]
    assert read_trace(path, 1, None, speed=1.0) == [Row(0.0, 374, 44)]


def test_hash_ids_repeat_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2]}\n'
        '{"timestamp": 1500, "input_length": 600, "output_length": 6, "hash_ids": [1, 3]}\n'
    )
    rows = read_trace(path, 10, None, 1.0)
    assert [row.at for row in rows] == [0.0, 1.5]
    first, second = (PromptMaker(50_000, text=False, seed=0).ask(row).prompt for row in rows)
    assert (len(first), len(second)) == (1000, 600)
    assert first[:HASH_BLOCK] == second[:HASH_BLOCK]
    assert first[HASH_BLOCK] != second[HASH_BLOCK]


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n", ""])
def test_what_is_no_trace(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"trace\.csv"):
        read_trace(path, 10, None, 1.0)


def test_figures(tmp_path: Path) -> None:
    timelines = [
        Timeline(10, sent=0.0, pieces=[0.1, 0.2, 0.4], ended=0.4, tokens=3),
        Timeline(10, sent=1.0, pieces=[1.5, 1.6], ended=1.6, tokens=6),
        Timeline(10, sent=1.0, pieces=[1.1], ended=1.1, tokens=1),
        Timeline(10, sent=1.0, ended=2.0, error="HTTP 429: later"),
    ]
    figures = report(timelines, Objectives(ttft_ms=200, tpot_ms=200))
    assert (figures["requests"], figures["failed"], figures["seconds"]) == (4, 1, 2.0)
    assert figures["errors"] == {"HTTP 429: later": 1}
    assert figures["output_tokens_per_second"] == 5.0
    assert figures["ttft_ms"]["p50"] == 100.0
    assert figures["ttft_ms"]["p99"] == 500.0
    assert figures["tpot_ms"]["p99"] == 150.0  # 0.3 s over two tokens; 20 ms of the second, 0 of the third
    assert figures["tpot_ms"]["p50"] == 20.0
    assert figures["gap_ms"]["p99"] == 200.0
    assert figures["goodput"]["requests_per_second"] == 1.0
    assert figures["goodput"]["share"] == 0.5
    plot(timelines, "a test", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_percentiles() -> None:
    assert percentile(list(range(1, 101)), 99) == 99
    assert percentile([5.0], 50) == 5.0
    assert percentile([], 50) is None
