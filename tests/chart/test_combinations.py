"""Hundreds of combinations of values, rendered by Helm's library and checked as ``semantics`` says."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import helm_python
import pytest
import yaml

from chart import API_VERSIONS, CHART, NAMESPACE, RELEASE, VALUES_FILES, objects, template
from chart_semantics import check

# Each dimension's values, as patches of the defaults.
DIMENSIONS: tuple[tuple[dict[str, Any], ...], ...] = (
    ({"accelerator": "cuda"}, {"accelerator": "cpu"}),
    (
        {"model": {"source": "hf", "hf": {"tokenSecret": "hub", "cacheClaim": "cache"}}},
        {"model": {"source": "pvc", "pvc": {"claimName": "models", "path": "a/b"}}},
        {"model": {"source": "s3", "s3": {"uri": "s3://bucket/model", "credentialsSecret": "keys"}}},
    ),
    tuple({"prefill": {"scaling": scaling}} for scaling in ("fixed", "external", "hpa")),
    tuple({"decode": {"scaling": scaling}} for scaling in ("fixed", "external", "hpa")),
    ({}, {"prefill": {"scaling": "fixed", "nodesPerReplica": 2}, "config": {"prefill": {"tp_size": 4}}}),
    ({}, {"decode": {"scaling": "external", "nodesPerReplica": 4}, "config": {"decode": {"pp_size": 8}}}),
    ({"rollout": {"decodeFirst": True}}, {"rollout": {"decodeFirst": False}}),
    ({"networkPolicy": {"enabled": False}}, {"networkPolicy": {"clients": []}}),
    ({"transport": {"rdma": {"enabled": True}}}, {}),
    (
        {"router": {"replicas": 3}},
        {"auth": {"existingSecret": "token", "apiKeysSecret": "keys", "testKeySecret": "key"}},
    ),
    (
        {"tls": {"secretName": "certificates"}},
        {"tls": {"publicSecretName": "edge", "clientCaSecretName": "clients"}},
        {},
    ),
    ({"serviceAccount": {"create": False}}, {"fullnameOverride": "x" * 60}),
    ({"prefill": {"replicas": 0}, "observability": {"dashboard": True}}, {"commonLabels": {"team": "a"}}),
)
SAMPLES = 300


def merged(*patches: dict[str, Any]) -> dict[str, Any]:
    """Later patches win."""
    result: dict[str, Any] = {}
    for patch in patches:
        for key, value in patch.items():
            known = result.get(key)
            result[key] = merged(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return result


def combinations() -> Iterator[dict[str, Any]]:
    """A random sample of the product, in which every pair of values of two dimensions is likely to meet often."""
    product = list(itertools.product(*DIMENSIONS))
    for patches in random.Random(8).sample(product, SAMPLES):
        yield merged(*patches)


def test_every_combination_renders_a_working_deployment() -> None:
    with helm_python.Chart.load(CHART) as chart:
        for values in combinations():
            rendered = chart.render(values, name=RELEASE, namespace=NAMESPACE)
            items = [item for name, text in rendered.items() if not name.endswith(".txt") for item in objects(text)]
            try:
                check(items, chart.merge_values(values))
            except AssertionError as error:
                raise AssertionError(f"with values {values}: {error}") from error


@pytest.mark.parametrize("file", VALUES_FILES, ids=lambda file: file.stem)
def test_every_values_file_renders_a_working_deployment(file: Any) -> None:
    values = yaml.safe_load(file.read_text())
    with helm_python.Chart.load(CHART) as chart:
        check(objects(template(4, file)), chart.merge_values(values))


@pytest.mark.parametrize("kind", ["prefill", "decode"])
@pytest.mark.parametrize("size", [1, 4])
def test_keda_scales_pools_of_single_pods_and_of_groups(kind: str, size: int) -> None:
    sets = [f"{kind}.scaling=keda", f"{kind}.nodesPerReplica={size}", f"{kind}.groupKind=LeaderWorkerSet"]
    sets += [f"config.{kind}.tp_size={size}"]
    values = {kind: {"scaling": "keda", "nodesPerReplica": size}, "config": {kind: {"tp_size": size}}}
    with helm_python.Chart.load(CHART) as chart:
        check(objects(template(4, sets=sets, apis=API_VERSIONS)), chart.merge_values(values))
