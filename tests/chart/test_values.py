"""Each value is in the schema, is used by a template, and is described; a slip is refused with the key named."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import helm_python
import pytest
import yaml

from chart import CHART, ROOT, helm

VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
TEMPLATES = "\n".join(file.read_text() for file in sorted((CHART / "templates").rglob("*")) if file.is_file())
# Parts of Kubernetes objects, whose keys are Kubernetes' own, and values for a parent chart.
FREE = {"strings", "free"}


def leaves(values: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        if isinstance(value, dict) and value and key != "resources":
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key)


def schema_of(path: tuple[str, ...]) -> Any:
    node = SCHEMA
    for key in path:
        node = resolved(node)["properties"][key]
    return resolved(node)


def resolved(node: dict[str, Any]) -> dict[str, Any]:
    return SCHEMA["definitions"][node["$ref"].rsplit("/", 1)[-1]] if "$ref" in node else node


def test_every_value_is_in_the_schema_and_every_schema_key_has_a_value() -> None:
    for path in leaves(VALUES):
        schema_of(path)

    def compare(schema: dict[str, Any], values: Any, path: str) -> None:
        node = resolved(schema)
        for key, inner in node.get("properties", {}).items():
            if path == "" and key in ("config", "global"):
                continue
            assert key in values, f"{path}{key} is in the schema, not in values.yaml"
            compare(inner, values[key], f"{path}{key}.")

    compare(SCHEMA, VALUES, "")


def test_every_value_is_used_by_a_template() -> None:
    """By its name as the last of a path, or within a block that is passed on whole."""
    for path in leaves(VALUES):
        whole = any(re.search(rf"toYaml [$.\w]*\.{name}\b", TEMPLATES) for name in (path[0], path[-2:][0]))
        assert whole or re.search(rf"\.{path[-1]}\b", TEMPLATES), ".".join(path)


def test_every_value_is_described_in_the_readme() -> None:
    table = (CHART / "README.md").read_text()
    for path in leaves(VALUES):
        if path[0] == "decode":  # the same keys as prefill, as its row says
            path = ("prefill", *path[1:])
        assert f"| `{'.'.join(path)}` |" in table or f"| `{'.'.join(path[:-1])}` |" in table, ".".join(path)


def test_both_pools_have_the_same_values() -> None:
    assert VALUES["prefill"] == VALUES["decode"]
    assert SCHEMA["properties"]["prefill"] == SCHEMA["properties"]["decode"]


def test_generated_files_are_fresh() -> None:
    done = subprocess.run([sys.executable, "-P", ROOT / "scripts" / "gen_chart", "--check"], check=False)
    assert done.returncode == 0


def test_no_object_takes_unknown_keys() -> None:
    def walk(node: Any, path: str) -> None:
        if isinstance(node, list):
            for item in node:
                walk(item, path)
        elif isinstance(node, dict):
            kinds = node.get("type", [])
            if path.rsplit("/", 1)[-1] not in FREE | {"global", "requests", "limits"} and "object" in (
                kinds if isinstance(kinds, list) else [kinds]
            ):
                if path.endswith("/items"):  # Kubernetes objects in lists
                    assert node == {"type": "object"} or node["additionalProperties"] is False, path
                else:
                    assert node.get("additionalProperties") is False, path
            for key, value in node.items():
                walk(value, f"{path}/{key}")

    walk(SCHEMA, "")


@pytest.mark.parametrize("version", [3, 4])
@pytest.mark.parametrize(
    "slip",
    [
        "prefil.replicas=2",
        "prefill.replica=2",
        "decode.autoscaling.maxReplica=2",
        "model.pvc.claim=x",
        "config.decode.engine.max_seqs=2",
        "config.rooter.max_queued=2",
        "config.session.token=secret",
        "config.decode.port=80",
        "router.service.typ=ClusterIP",
    ],
)
def test_a_slip_is_refused_with_the_key_named(version: int, slip: str) -> None:
    done = helm(version, "template", "t", CHART, "--set", slip)
    assert done.returncode != 0
    path = slip.partition("=")[0].split(".")
    wrong = next(key for key in path if key in ("prefil", "rooter") or key == path[-1])
    assert re.search(rf"dditional propert(y|ies) '?{wrong}\b", done.stderr), done.stderr


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"decode": {"replicas": 0}}, "decode.replicas is 0"),
        ({"decode": {"nodesPerReplica": 3}, "config": {"decode": {"tp_size": 4}}}, "decode.nodesPerReplica is 3"),
        ({"prefill": {"scaling": "hpa", "autoscaling": {"minReplicas": 0}}}, "prefill.autoscaling.minReplicas is 0"),
        ({"prefill": {"autoscaling": {"minReplicas": 5}}}, "prefill.autoscaling.minReplicas is larger"),
        ({"prefill": {"scaling": "keda"}}, "no keda.sh/v1alpha1"),
        (
            {"decode": {"nodesPerReplica": 2, "groupKind": "LeaderWorkerSet"}, "config": {"decode": {"tp_size": 2}}},
            "no leaderworkerset.x-k8s.io/v1",
        ),
        (
            {"decode": {"nodesPerReplica": 2, "scaling": "hpa"}, "config": {"decode": {"tp_size": 2}}},
            "set decode.groupKind to LeaderWorkerSet",
        ),
        (
            {"decode": {"nodesPerReplica": 2, "replicas": 9}, "config": {"decode": {"tp_size": 2}}},
            "decode.replicas is 9",
        ),
        ({"prefill": {"replicas": 0}, "config": {"router": {"disaggregate": "always"}}}, "disaggregate is always"),
        ({"model": {"source": "pvc"}}, "set model.pvc.claimName"),
        ({"model": {"source": "s3"}}, "set model.s3.uri"),
        ({"config": {"model": {"path": ""}}}, "set config.model.path"),
        ({"tls": {"clientCaSecretName": "ca"}}, "tls.clientCaSecretName"),
        ({"image": {"worker": {"tag": "latest"}}}, "/image/worker/tag"),
    ],
)
def test_what_cannot_work_is_refused_with_the_way_out(values: dict[str, Any], message: str) -> None:
    with helm_python.Chart.load(CHART) as chart, pytest.raises(helm_python.HelmError, match=re.escape(message)):
        chart.render(values, name="t", namespace="n")
