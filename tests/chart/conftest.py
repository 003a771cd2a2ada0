"""Tests of the Helm chart: run by ``make chart-test``, which brings their tools."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from chart import TOOLS

if importlib.util.find_spec("helm_python") is None or not TOOLS.is_dir():
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of this folder."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.chart)
