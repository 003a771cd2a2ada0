"""Alerts and dashboard: every metric that they name exists, with the labels they use, and every alert is explained."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from twinpool.config import Config
from twinpool.router.discovery import StaticDiscovery
from twinpool.router.metrics import RouterMetrics
from twinpool.router.registry import Registry
from twinpool.router.worker_metrics import WorkerMetrics

ROOT = Path(__file__).parents[2]
ALERTS = yaml.safe_load((ROOT / "helm/twinpool/files/alerts.yaml").read_text())["groups"][0]["rules"]
DASHBOARD = json.loads((ROOT / "helm/twinpool/files/dashboard.json").read_text())
RUNBOOK = (ROOT / "docs/runbook.md").read_text()
SCRAPED = {"namespace", "le"}
"""Labels that Prometheus adds, and those of histograms."""


def shown() -> dict[str, set[str]]:
    """Names of series, and their labels."""
    metrics = RouterMetrics()
    own = {
        family.name: set(collector._labelnames)  # type: ignore[attr-defined]
        for collector in metrics.registry._collector_to_names
        for family in collector.collect()
    }
    metrics.registry.register(WorkerMetrics(Registry(Config(), StaticDiscovery(()))))
    found: dict[str, set[str]] = {}
    for family in metrics.registry.collect():
        labels = own.get(family.name) or set(getattr(family, "_labelnames", ()))
        suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(family.type, [""])
        found |= {family.name + suffix: labels for suffix in suffixes}
    return found


def expressions() -> Iterator[tuple[str, str]]:
    for rule in ALERTS:
        yield rule["alert"], rule["expr"]
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


@pytest.mark.parametrize(("place", "expression"), list(expressions()))
def test_metrics_and_labels_exist(place: str, expression: str) -> None:
    known = shown()
    names = re.findall(r"\btwinpool_\w+", expression)
    assert names
    labels = set().union(*(known[name] for name in names if name in known)) | SCRAPED
    assert not set(names) - known.keys()
    used = [label for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(", ")]
    used += re.findall(r"[{,](\w+)=", expression)
    assert not set(used) - labels


def test_every_alert_has_its_paragraph_and_every_paragraph_its_alert() -> None:
    headings = re.findall(r"^## (\w+)$", RUNBOOK, re.MULTILINE)
    assert sorted(headings) == sorted(rule["alert"] for rule in ALERTS)
    for rule in ALERTS:
        notes = rule["annotations"]
        assert notes["summary"]
        assert notes["runbook"].endswith(f"/docs/runbook.md#{rule['alert'].lower()}")
        paragraph = RUNBOOK.split(f"## {rule['alert']}\n")[1].split("\n## ")[0]
        assert re.search(r"\bLook\b", paragraph), "says how to look"
        assert re.search(r"\bdo\*", paragraph, re.IGNORECASE), "says what to do"
        labels: Any = rule["labels"]
        assert labels["severity"] in ("warning", "critical")


def test_panels_do_not_overlap() -> None:
    spots = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in DASHBOARD["panels"]]
    assert len(set(spots)) == len(spots) == len({panel["id"] for panel in DASHBOARD["panels"]})
