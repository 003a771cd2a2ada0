"""What commands print for people."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest
from rich.console import Console

from twinpool.cli.output import print_nested
from twinpool.cli.top import table
from twinpool.results import Link, Status, WorkerStatus


def test_nested_figures_numbers_and_lists(capsys: pytest.CaptureFixture[str]) -> None:
    figure = {"median": 1.5, "p90": 2.0, "least": 1.0, "count": 3}
    print_nested(
        {"rounds": 3, "transport": {"name": "nixl/shm", "sizes": [{"blocks": 16}, {"blocks": 256}]}, "gap": figure}
    )
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["rounds", "3"],
        ["transport"],
        ["name", "nixl/shm"],
        ["sizes"],
        ["blocks", "16"],
        ["sizes"],
        ["blocks", "256"],
        ["gap", "1.500", "p90", "2.000,", "least", "1.000,", "n", "3"],
    ]


def test_top_needs_a_line_per_worker_and_80_columns() -> None:
    def worker(number: int, role: str, **different: Any) -> WorkerStatus:
        links = tuple(Link(f"prefill-{40000 + n}", n != 1, "nixl/shm", 12.345 + n, "") for n in range(3))
        given: dict[str, Any] = {
            **{"worker_id": f"{role}-{40000 + number}", "role": role, "state": "alive", "address": "127.0.0.1:40000"},
            **{"model": "m", "running": 256, "waiting": 1000, "loading": 99, "held": 99, "free_blocks": 0},
            **{"total_blocks": 9, "open_exchanges": 0, "quarantined_blocks": 0, "draining": False, "error": ""},
            **{"links": links if role == "decode" else (), "steps": 0},
        }
        return WorkerStatus(**(given | different))

    workers = (
        worker(1, "prefill"),
        worker(2, "decode"),
        worker(3, "decode", draining=True),
        worker(4, "decode", links=()),
    )
    before = Status("0.1.0", workers, 512, True, "")
    after = dataclasses.replace(before, workers=tuple(dataclasses.replace(each, steps=12_345) for each in workers))
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table(after, before, 1.0))
    lines = [line.split() for line in console.export_text().splitlines() if "4000" in line]
    assert lines == [
        ["prefill-40001", "prefill", "alive", "256", "1000", "99", "99", "100%", "12345.0"],
        ["decode-40002", "decode", "alive", "256", "1000", "99", "99", "100%", "12345.0", "2/3", "12.3"],
        ["decode-40003", "decode", "draining", "256", "1000", "99", "99", "100%", "12345.0", "2/3", "12.3"],
        ["decode-40004", "decode", "alive", "256", "1000", "99", "99", "100%", "12345.0"],
    ]
