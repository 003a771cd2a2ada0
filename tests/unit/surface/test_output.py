"""What commands print for people."""

from __future__ import annotations

import pytest

from twinpool.cli.output import print_nested


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
