"""What an upgrade changes, and what it leaves alone."""

from __future__ import annotations

from typing import Any

import helm_python
import pytest

from chart import CHART, NAMESPACE, RELEASE, Object, containers, environment, named, objects

TOKEN = {"auth": {"existingSecret": "token"}}


def rendered(*patches: dict[str, Any]) -> list[Object]:
    with helm_python.Chart.load(CHART) as chart:
        values = TOKEN.copy()
        for patch in patches:
            values = merged(values, patch)
        texts = chart.render(values, name=RELEASE, namespace=NAMESPACE)
    return [item for name, text in texts.items() if not name.endswith(".txt") for item in objects(text)]


def merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    result = dict(first)
    for key, value in second.items():
        result[key] = merged(result[key], value) if isinstance(result.get(key), dict) else value
    return result


def pods(items: list[Object]) -> dict[str, Object]:
    return {
        role: named(items, "Deployment", f"{RELEASE}-{role}")["spec"]["template"]
        for role in ("router", "prefill", "decode")
    }


def rolled(before: list[Object], after: list[Object]) -> set[str]:
    """The components whose pods are replaced."""
    old, new = pods(before), pods(after)
    return {role for role in old if old[role] != new[role]}


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("patch", [{"replicas": 3}, {"scaling": "hpa"}, {"autoscaling": {"maxReplicas": 9}}])
def test_scaling_one_pool_replaces_no_pod_and_changes_nothing_of_the_other(role: str, patch: dict[str, Any]) -> None:
    before, after = rendered(), rendered({role: patch})
    assert rolled(before, after) == set()
    other = "decode" if role == "prefill" else "prefill"
    for item in before:
        if item["metadata"]["labels"]["app.kubernetes.io/component"] == other:
            assert item in after


@pytest.mark.parametrize(
    ("patch", "expected"),
    [
        ({"config": {"decode": {"engine": {"max_num_seqs": 8}}}}, {"decode"}),
        ({"config": {"prefill": {"engine": {"max_num_seqs": 8}}}}, {"prefill"}),
        ({"config": {"router": {"max_queued": 8}}}, {"router"}),
        ({"config": {"model": {"revision": "v2"}}}, {"router", "prefill", "decode"}),
        ({"image": {"worker": {"tag": "2"}}}, {"prefill", "decode"}),
        ({"image": {"router": {"tag": "2"}}}, {"router"}),
        ({"router": {"replicas": 2}}, set()),
    ],
)
def test_only_what_reads_a_setting_is_replaced(patch: dict[str, Any], expected: set[str]) -> None:
    assert rolled(rendered(), rendered(patch)) == expected


@pytest.mark.parametrize("patch", [{"config": {"model": {"revision": "v2"}}}, {"image": {"worker": {"tag": "2"}}}])
def test_new_prefill_workers_wait_for_a_decode_worker_of_their_kind(patch: dict[str, Any]) -> None:
    """What the two Services that the wait asks for select, before and after."""
    before, after = rendered(), rendered(patch)
    (wait,) = (c for c in containers(pods(after)["prefill"]) if c["name"] == "wait-for-decode")
    names = environment(wait)
    same, any_kind = (named(after, "Service", names[key])["spec"]["selector"] for key in ("SAME_KIND", "ANY_KIND"))
    old, new = (pods(items)["decode"]["metadata"]["labels"] for items in (before, after))
    assert any_kind.items() <= old.items()
    assert any_kind.items() <= new.items()
    assert same.items() <= new.items()
    assert not same.items() <= old.items()


def test_gpu_pools_need_no_spare_gpu_to_roll() -> None:
    for role in ("prefill", "decode"):
        strategy = named(rendered(), "Deployment", f"{RELEASE}-{role}")["spec"]["strategy"]
        assert strategy["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
