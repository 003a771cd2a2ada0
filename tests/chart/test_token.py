"""Upgrades keep the cluster token that the chart made: helm finds it in the cluster, here a small stand-in."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from chart import CHART, NAMESPACE, helm, named, objects

NAME = "twinpool-cluster-token"
TOKEN = base64.b64encode(b"of-the-first-install").decode()
SECRET = {
    "apiVersion": "v1",
    "kind": "Secret",
    "metadata": {"name": NAME, "namespace": NAMESPACE},
    "data": {"token": TOKEN},
}
KINDS = {
    "v1": ("ConfigMap", "Pod", "Secret", "Service", "ServiceAccount"),
    "apps/v1": ("Deployment",),
    "networking.k8s.io/v1": ("NetworkPolicy",),
    "policy/v1": ("PodDisruptionBudget",),
}


def resources(version: str) -> dict[str, object]:
    plural = {kind: kind.lower().replace("policy", "policie") + "s" for kind in KINDS[version]}
    found = [{"name": name, "namespaced": True, "kind": kind, "verbs": ["get"]} for kind, name in plural.items()]
    return {"kind": "APIResourceList", "groupVersion": version, "resources": found}


def group(version: str) -> dict[str, object]:
    known = {"groupVersion": version, "version": "v1"}
    return {"name": version.partition("/")[0], "versions": [known], "preferredVersion": known}


GROUPS = [version for version in KINDS if version != "v1"]
ANSWERS = {
    "/version": {"major": "1", "minor": "35", "gitVersion": "v1.35.0"},
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/api/v1": resources("v1"),
    "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": [group(version) for version in GROUPS]},
    **{f"/apis/{version}": resources(version) for version in GROUPS},
    f"/api/v1/namespaces/{NAMESPACE}/secrets/{NAME}": SECRET,
}


class Cluster(BaseHTTPRequestHandler):
    """Answers what helm asks before it renders."""

    def do_GET(self) -> None:
        answer = ANSWERS.get(self.path.partition("?")[0])
        body = json.dumps(answer or {"kind": "Status", "apiVersion": "v1", "code": 404, "reason": "NotFound"}).encode()
        self.send_response(200 if answer else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""


@pytest.fixture
def api() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Cluster)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("version", [3, 4])
def test_an_upgrade_keeps_the_token(version: int, api: str) -> None:
    where = ["--dry-run=server", "--kube-apiserver", api, "--namespace", NAMESPACE]
    done = helm(version, "template", "twinpool", CHART, *where, "--is-upgrade", "--disable-openapi-validation")
    assert done.returncode == 0, done.stderr
    assert named(objects(done.stdout), "Secret", NAME)["data"] == {"token": TOKEN}
