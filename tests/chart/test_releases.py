"""Lint, output and API versions, by the real programs, for each file of values."""

from __future__ import annotations

import base64
import re
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from chart import API_VERSIONS, CHART, TOOLS, VALUES_FILES, helm, objects, template

OLDEST, NEWEST = "1.28", "1.37"
ADAPTED = {"twinpool_queued_tokens", "twinpool_backlog"}
"""External metrics that an adapter makes for the HPA."""
OUTPUTS = sorted((CHART / "examples" / "output").glob("*.yaml"))


@pytest.mark.parametrize("version", [3, 4])
@pytest.mark.parametrize("file", [None, *VALUES_FILES], ids=lambda file: file.stem if file else "none")
def test_lint(version: int, file: Path | None) -> None:
    needs_apis = file is not None and file.stem in ("keda-values", "lws-values")
    if needs_apis:  # lint cannot be told of API versions
        pytest.skip("template covers it")
    done = helm(version, "lint", "--strict", CHART, *(("--values", file) if file else ()))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("file", VALUES_FILES, ids=lambda file: file.stem)
def test_helm_3_and_4_render_the_same(file: Path) -> None:
    assert objects(template(3, file)) == objects(template(4, file))


@pytest.mark.parametrize("file", VALUES_FILES, ids=lambda file: file.stem)
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_objects_fit_kubernetes(file: Path, version: str) -> None:
    for item in objects(template(4, file)):
        if not item["apiVersion"].startswith(API_VERSIONS):
            kubernetes_validate.validate(item, version, strict=True)
        for pod in _group_templates(item):  # the pods of a LeaderWorkerSet are Kubernetes' own
            kubernetes_validate.validate(
                {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x", **pod["metadata"]}, "spec": pod["spec"]},
                version,
                strict=True,
            )


def _group_templates(item: dict[str, object]) -> list[dict[str, dict[str, object]]]:
    if item["kind"] != "LeaderWorkerSet":
        return []
    group = item["spec"]["leaderWorkerTemplate"]  # type: ignore[index]
    return [group["leaderTemplate"], group["workerTemplate"]]


def test_every_example_has_its_output() -> None:
    names = {file.name.removeprefix("values-") for file in (CHART / "examples").glob("values-*.yaml")}
    assert {file.name for file in OUTPUTS} == names


@pytest.mark.parametrize("output", OUTPUTS, ids=lambda file: file.stem)
def test_examples_render_to_the_output_beside_them(output: Path) -> None:
    values = CHART / "examples" / f"values-{output.name}"
    found = template(4, values, apis=["monitoring.coreos.com/v1"])
    assert found == output.read_text(), "run make chart and look at the difference"


def test_a_new_token_is_long_and_random() -> None:
    tokens = {
        base64.b64decode(item["data"]["token"])
        for _ in range(2)
        for item in objects(template(4))
        if item["kind"] == "Secret"
    }
    assert len(tokens) == 2
    assert all(len(token) == 48 for token in tokens)


def test_a_named_token_makes_no_secret() -> None:
    items = objects(template(4, sets=["auth.existingSecret=mine"]))
    assert not [item for item in items if item["kind"] == "Secret"]


@pytest.mark.parametrize("scaling", ["fixed", "external"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_notes_name_commands_that_fit_the_release(scaling: str, nodes: int) -> None:
    sets = [f"decode.scaling={scaling}", f"decode.nodesPerReplica={nodes}", f"config.decode.tp_size={nodes}"]
    args = ["install", "llm", CHART, "--namespace", "team", "--dry-run=client"]
    done = helm(4, *args, *(word for item in sets for word in ("--set", item)))
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("NOTES:")[2]
    assert "helm -n team test llm" in notes
    kind = "deployment/llm-twinpool-decode" if nodes == 1 else "statefulset/llm-twinpool-decode"
    assert (f"kubectl -n team scale {kind} --replicas={2 * nodes}" in notes) == (scaling == "external")


def test_alert_rules_are_what_prometheus_takes(tmp_path: Path) -> None:
    items = objects(template(4, CHART / "ci/external-pvc-values.yaml"))
    (rules,) = (item for item in items if item["kind"] == "PrometheusRule")
    check_rules(tmp_path / "rules.yaml", rules["spec"])
    assert rules["spec"]["groups"], "no rules"


def check_rules(file: Path, rules: object) -> None:
    file.write_text(yaml.safe_dump(rules))
    done = subprocess.run([TOOLS / "promtool", "check", "rules", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_queries_of_scalers_are_what_prometheus_takes(tmp_path: Path) -> None:
    scalers = [item for item in objects(template(4, CHART / "ci/keda-values.yaml")) if item["kind"] == "ScaledObject"]
    queries = [trigger["metadata"]["query"] for item in scalers for trigger in item["spec"]["triggers"]]
    assert len(queries) == 4
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(queries)]
    check_rules(tmp_path / "queries.yaml", {"groups": [{"name": "queries", "rules": rules}]})


def test_metrics_that_the_chart_names_exist() -> None:
    """Names in alerts, dashboard and scalers, against those that a router really shows."""
    exposed = subprocess.run(
        [sys.executable, "-P", "-c", _SHOW_METRICS], capture_output=True, text=True, check=True
    ).stdout.split()
    places = [CHART / "files/alerts.yaml", CHART / "files/dashboard.json", CHART / "templates/scaling.yaml"]
    for place in places:
        names = set(re.findall(r"\btwinpool_[a-z_]+(?=[{\[) ]|$)", place.read_text(), re.MULTILINE))
        assert names, place
        for name in names - ADAPTED:
            base = re.sub(r"_(bucket|sum|count)$", "", name)
            assert name in exposed or base in exposed, f"{place.name}: {name}"


_SHOW_METRICS = """
from twinpool.config import Config
from twinpool.router.discovery import StaticDiscovery
from twinpool.router.metrics import RouterMetrics
from twinpool.router.registry import Registry
from twinpool.router.worker_metrics import WorkerMetrics
metrics = RouterMetrics()
metrics.registry.register(WorkerMetrics(Registry(Config(), StaticDiscovery(()))))
for family in metrics.registry.collect():
    print(family.name + ("_total" if family.type == "counter" else ""))
"""
