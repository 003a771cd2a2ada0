"""What any rendering of the chart must satisfy, beyond what schemas can say. Each check takes all objects."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from chart import Object, all_pods, containers, environment, matches, pod_templates
from twinpool.config import Config
from twinpool.config_loader import load

SCALED = ("Deployment", "StatefulSet", "LeaderWorkerSet")


def check(items: list[Object], values: dict[str, Any]) -> None:
    """Runs every check; ``values`` are the merged ones that were rendered."""
    for rule in RULES:
        rule(items, values)


def names_are_unique_and_short(items: list[Object], values: dict[str, Any]) -> None:
    names = [(item["kind"], item["metadata"]["name"]) for item in items]
    assert len(set(names)) == len(names)
    # A StatefulSet's pods, and a LeaderWorkerSet's, add numbers.
    assert all(len(name) <= 56 for _, name in names)


def selectors_find_pods(items: list[Object], values: dict[str, Any]) -> None:
    pods = [pod["metadata"]["labels"] for pod in all_pods(items)]
    for item in items:
        where = f"{item['kind']}/{item['metadata']['name']}"
        spec = item.get("spec", {})
        if item["kind"] in ("Deployment", "StatefulSet"):
            (pod,) = pod_templates(item)
            assert matches(spec["selector"]["matchLabels"], pod["metadata"]["labels"]), where
            others = [labels for labels in pods if labels is not pod["metadata"]["labels"]]
            assert not any(matches(spec["selector"]["matchLabels"], labels) for labels in others), where
        elif item["kind"] == "Service":
            wanted = {k: v for k, v in spec["selector"].items() if not k.startswith("leaderworkerset")}
            assert any(matches(wanted, labels) for labels in pods), where
        elif item["kind"] in ("PodDisruptionBudget", "PodMonitor"):
            assert any(matches(spec["selector"]["matchLabels"], labels) for labels in pods), where
        elif item["kind"] == "ServiceMonitor":
            found = [
                other
                for other in items
                if other["kind"] == "Service" and matches(spec["selector"]["matchLabels"], other["metadata"]["labels"])
            ]
            assert len(found) == 1, where
            ports = {port["name"] for port in found[0]["spec"]["ports"]}
            assert {endpoint["port"] for endpoint in spec["endpoints"]} <= ports
        elif item["kind"] == "NetworkPolicy":
            selectors = [spec["podSelector"]["matchLabels"]]
            for rule in spec["ingress"]:
                peers = [peer["podSelector"].get("matchLabels", {}) for peer in rule.get("from", ()) if len(peer) == 1]
                selectors += [selector for selector in peers if "app.kubernetes.io/component" in selector]
            assert all(any(matches(selector, labels) for labels in pods) for selector in selectors), where


def ports_exist(items: list[Object], values: dict[str, Any]) -> None:
    pods = all_pods(items)
    for pod in pods:
        for container in containers(pod):
            ports = container.get("ports", [])
            known = {port["name"] for port in ports} | {port["containerPort"] for port in ports}
            for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
                if probe := container.get(kind):
                    port = probe["grpc"]["port"] if "grpc" in probe else probe["httpGet"]["port"]
                    assert port in known, f"{container['name']}: {kind} asks port {port}"
    for item in items:
        spec = item.get("spec", {})
        if item["kind"] == "Service":
            wanted = {port["targetPort"] for port in spec["ports"]}
            assert wanted <= _ports_of(pods, spec["selector"]), item["metadata"]["name"]
        elif item["kind"] == "NetworkPolicy":
            wanted = {port["port"] for rule in spec["ingress"] for port in rule.get("ports", ())}
            assert wanted <= _ports_of(pods, spec["podSelector"]["matchLabels"]), item["metadata"]["name"]
        elif item["kind"] == "PodMonitor":
            wanted = {endpoint["port"] for endpoint in spec["podMetricsEndpoints"]}
            assert wanted <= _ports_of(pods, spec["selector"]["matchLabels"])


def _ports_of(pods: list[Object], selector: dict[str, str]) -> set[str]:
    wanted = {key: value for key, value in selector.items() if not key.startswith("leaderworkerset")}
    return {
        port["name"]
        for pod in pods
        if matches(wanted, pod["metadata"]["labels"])
        for container in containers(pod)
        for port in container.get("ports", ())
    }


def replicas_only_when_fixed(items: list[Object], values: dict[str, Any]) -> None:
    scaled = {item["spec"]["scaleTargetRef"]["name"] for item in items if "scaleTargetRef" in item.get("spec", {})}
    for item in items:
        role = item["metadata"].get("labels", {}).get("app.kubernetes.io/component")
        if item["kind"] in SCALED and role in ("prefill", "decode"):
            pool = values[role]
            assert ("replicas" in item["spec"]) == (pool["scaling"] == "fixed"), role
            assert (item["metadata"]["name"] in scaled) == (pool["scaling"] in ("keda", "hpa")), role
            if pool["scaling"] == "fixed":
                nodes = pool["nodesPerReplica"] if item["kind"] == "StatefulSet" else 1
                assert item["spec"]["replicas"] == pool["replicas"] * nodes
    targets = {(item["kind"], item["metadata"]["name"]) for item in items if item["kind"] in SCALED}
    for item in items:
        if "scaleTargetRef" in item.get("spec", {}):
            target = item["spec"]["scaleTargetRef"]
            assert (target["kind"], target["name"]) in targets


def images_are_pinned(items: list[Object], values: dict[str, Any]) -> None:
    for pod in all_pods(items):
        for container in containers(pod):
            _, _, tag = container["image"].rpartition("/")[2].partition(":")
            assert tag, f"{container['image']} has no tag"
            assert tag != "latest"


def pods_are_restricted(items: list[Object], values: dict[str, Any]) -> None:
    """What the Pod Security Standard "restricted" asks, and a root file system that nobody writes."""
    for pod in all_pods(items):
        security = pod["spec"]["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] > 0
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod["spec"].keys()
        for container in containers(pod):
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"]["drop"] == ["ALL"]
            rdma = values["transport"]["rdma"]["enabled"] and container["name"] in ("prefill", "decode")
            assert security["capabilities"].get("add", []) == (["IPC_LOCK"] if rdma else [])
            assert "memory" in container["resources"]["limits"]


def volumes_and_references_exist(items: list[Object], values: dict[str, Any]) -> None:
    made = {(item["kind"], item["metadata"]["name"]) for item in items}
    given = {("Secret", values["auth"]["existingSecret"])}
    given |= {("Secret", values["auth"]["testKeySecret"])}
    given |= {("Secret", values["model"]["hf"]["tokenSecret"]), ("Secret", values["model"]["s3"]["credentialsSecret"])}
    for pod in all_pods(items):
        volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", ())}
        mounted = {mount["name"] for c in containers(pod) for mount in c.get("volumeMounts", ())}
        assert mounted == volumes.keys()
        for volume in volumes.values():
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in made
        for container in containers(pod):
            paths = [mount["mountPath"] for mount in container.get("volumeMounts", ())]
            assert len(set(paths)) == len(paths)
            for item in container.get("env", ()):
                if "secretKeyRef" in item.get("valueFrom", {}):
                    assert ("Secret", item["valueFrom"]["secretKeyRef"]["name"]) in made | given
        account = pod["spec"].get("serviceAccountName", "default")
        assert ("ServiceAccount", account) in made or not values["serviceAccount"]["create"] or account == "default"


def variables_are_unique_and_defined(items: list[Object], values: dict[str, Any]) -> None:
    for pod in all_pods(items):
        for container in containers(pod):
            seen: set[str] = set()
            for item in container.get("env", ()):
                assert item["name"] not in seen, item["name"]
                # Kubernetes expands only variables that come earlier in the list.
                assert set(re.findall(r"\$\((\w+)\)", item.get("value", ""))) <= seen, item["name"]
                seen.add(item["name"])


def configuration_is_valid(items: list[Object], values: dict[str, Any]) -> None:
    """The file and each container's environment are what twinpool itself accepts, and the grace outlasts the drain."""
    (text,) = (item["data"]["twinpool.yaml"] for item in items if "twinpool.yaml" in item.get("data", {}))
    assert yaml.safe_load(text) == values["config"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "twinpool.yaml"
        path.write_text(text)
        for pod, container in _twinpool_containers(items):
            config = load(path, environ=environment(container) | {"TWINPOOL_CONFIG": str(path)}).config
            grace = pod["spec"]["terminationGracePeriodSeconds"]
            assert grace > _longest_end(config, container["name"]), container["name"]


def _twinpool_containers(items: list[Object]) -> Iterator[tuple[Object, Object]]:
    for pod in all_pods(items):
        for container in pod["spec"]["containers"]:
            if "TWINPOOL_CONFIG" in environment(container):
                yield pod, container


def _longest_end(config: Config, role: str) -> float:
    if role == "router":
        return config.router.drain_timeout_s
    if role == "prefill":
        return config.prefill.drain_timeout_s + config.transport.read_timeout_s
    return config.decode.drain_timeout_s


RULES: tuple[Callable[[list[Object], dict[str, Any]], None], ...] = (
    names_are_unique_and_short,
    selectors_find_pods,
    ports_exist,
    replicas_only_when_fixed,
    images_are_pinned,
    pods_are_restricted,
    volumes_and_references_exist,
    variables_are_unique_and_defined,
    configuration_is_valid,
)
