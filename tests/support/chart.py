"""The Helm chart for tests: rendering, by the real programs or (in milliseconds) by Helm's library."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "twinpool"
TOOLS = ROOT / "build" / "chart-tools"
API_VERSIONS = ("keda.sh/v1alpha1", "leaderworkerset.x-k8s.io/v1", "monitoring.coreos.com/v1")
VALUES_FILES = sorted([*(CHART / "ci").glob("*.yaml"), *(CHART / "examples").glob("values-*.yaml")])
WORKLOADS = ("Deployment", "StatefulSet", "LeaderWorkerSet", "Pod")
RELEASE, NAMESPACE = "twinpool", "llm"

Object = dict[str, Any]
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def helm(version: int, *args: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs helm 3 or 4."""
    return subprocess.run([TOOLS / f"helm{version}", *args], capture_output=True, text=True, check=False)


def template(version: int, *values: Path, sets: Iterable[str] = (), apis: Iterable[str] = API_VERSIONS) -> str:
    """The text that ``helm template`` prints."""
    args: list[str | Path] = ["template", RELEASE, CHART, "--namespace", NAMESPACE]
    for file in values:
        args += ["--values", file]
    for item in sets:
        args += ["--set", item]
    for api in apis:
        args += ["--api-versions", api]
    done = helm(version, *args)
    assert done.returncode == 0, done.stderr
    return done.stdout


def objects(text: str) -> list[Object]:
    """The objects of a stream of documents."""
    return [item for item in yaml.load_all(text, _LOADER) if item]


def named(items: Iterable[Object], kind: str, name: str) -> Object:
    """The one object of a kind and name."""
    (found,) = (item for item in items if item["kind"] == kind and item["metadata"]["name"] == name)
    return found


def pod_templates(item: Object) -> Iterator[Object]:
    """The pod templates of a workload: one, or those of leader and followers; a Pod is its own."""
    if item["kind"] == "Pod":
        yield item
    elif item["kind"] == "LeaderWorkerSet":
        group = item["spec"]["leaderWorkerTemplate"]
        yield from (group["leaderTemplate"], group["workerTemplate"])
    elif item["kind"] in WORKLOADS:
        yield item["spec"]["template"]


def all_pods(items: Iterable[Object]) -> list[Object]:
    """All pod templates."""
    return [pod for item in items for pod in pod_templates(item)]


def containers(pod: Object) -> list[Object]:
    """Containers of a pod, those that run before the others too."""
    return [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]


def matches(selector: dict[str, str], labels: dict[str, str]) -> bool:
    """Whether labels have all that a selector wants."""
    return selector.items() <= labels.items()


def environment(container: Object) -> dict[str, str]:
    """Literal values of a container's variables."""
    return {item["name"]: item["value"] for item in container.get("env", ()) if "value" in item}
