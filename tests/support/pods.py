"""A cluster's worth of rendered objects as local processes: what kubelet, DNS and controllers do, on loopback.

1. ``Namespace`` takes the objects of a release, the folders behind claims, and Secrets that the release only names.
2. ``start`` makes a pod of a workload: an address of its own (127.x.y.z), its volumes as folders, its init containers
   one after the other, then its containers with their own command and environment. Paths of mounts are replaced by
   the folders, 0.0.0.0 by the pod's address; nothing else is changed.
3. A thread asks the probes. Pods that are ready stand in the names of the Services that select them: processes
   resolve the cluster's names as they are, through a preloaded ``getaddrinfo`` (names.c).
4. ``delete`` does what a deletion does: out of the Services, preStop, SIGTERM, SIGKILL when the grace is over.
5. ``close`` kills what is left.
"""

from __future__ import annotations

import base64
import itertools
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from chart import Object, matches, pod_templates

READY_TIMEOUT_S = 240.0
PROBE_PAUSE_S = 0.1
# As in the images (docker/Dockerfile), and one thread for computing.
IMAGE_ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}


@dataclass
class Pod:
    """A running pod; ``restarts`` are not done: a process that ends is a finding."""

    name: str
    address: str
    template: Object
    folder: Path
    subdomain: str = ""
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    is_ready: bool = False
    is_leaving: bool = False
    failed_probes: list[str] = field(default_factory=list)

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.template["metadata"].get("labels", {}))

    def log(self, container: str) -> str:
        return (self.folder / f"{container}.log").read_text(errors="replace")


class Namespace:
    """See the module."""

    def __init__(
        self,
        folder: Path,
        name: str,
        objects: Sequence[Object],
        claims: Mapping[str, Path],
        secrets: Mapping[str, Mapping[str, str]],
    ) -> None:
        self.name = name
        self.objects = list(objects)
        self.pods: dict[str, Pod] = {}
        self._folder = folder
        self._claims = claims
        self._secrets = {key: dict(value) for key, value in secrets.items()}
        for item in self._of_kind("Secret"):
            self._secrets[item["metadata"]["name"]] = {
                key: base64.b64decode(value).decode() for key, value in item["data"].items()
            }
        # A network of our own on loopback: pods of other tests have other addresses and may use the same ports.
        self._network = f"127.{random.randint(64, 254)}.{random.randint(1, 254)}"
        self._numbers = itertools.count(1)
        self._hosts = folder / "hosts"
        self._preload = folder / "names.so"
        source = Path(__file__).with_name("names.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", self._preload, source, "-ldl"], check=True)
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._write_hosts()
        self._prober = threading.Thread(target=self._probe_all, name="kubelet", daemon=True)
        self._prober.start()

    # Pods

    def start(self, workload: str, ordinal: int = 0) -> Pod:
        """Starts a pod of a workload; returns when its containers run."""
        item = next(
            item
            for item in self.objects
            if item["metadata"]["name"] == workload and item["kind"] in ("Deployment", "StatefulSet", "Pod")
        )
        (template,) = pod_templates(item)
        with self._lock:
            name = workload if item["kind"] == "Pod" else f"{workload}-{ordinal}"
            number = str(next(self._numbers))
            # Short, since Unix sockets lie below it, whose paths may have 107 bytes.
            folder = self._folder / number
            folder.mkdir()
            subdomain = item.get("spec", {}).get("serviceName", "")
            pod = Pod(name, f"{self._network}.{number}", template, folder, subdomain)
            self.pods[name] = pod
        self._write_hosts()
        for container in template["spec"].get("initContainers", ()):
            assert self._run(pod, container).wait(READY_TIMEOUT_S) == 0, pod.log(container["name"])
        for container in template["spec"]["containers"]:
            pod.processes[container["name"]] = self._run(pod, container)
        return pod

    def ready(self, *pods: Pod) -> None:
        """Waits until the readiness probes of pods succeed."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        for pod in pods:
            while not pod.is_ready:
                for name, process in pod.processes.items():
                    assert process.poll() is None, f"{pod.name} ended with {process.poll()}:\n{pod.log(name)}"
                assert time.monotonic() < deadline, f"{pod.name} is not ready:\n{pod.log(next(iter(pod.processes)))}"
                time.sleep(0.05)

    def delete(self, pod: Pod) -> tuple[int, float]:
        """Ends a pod as a deletion does; returns the exit code (negative: the signal) and the seconds that it took."""
        began = time.monotonic()
        grace = pod.template["spec"]["terminationGracePeriodSeconds"]
        pod.is_leaving = True
        self._write_hosts()
        (container,) = pod.template["spec"]["containers"]
        process = pod.processes[container["name"]]
        if hook := container.get("lifecycle", {}).get("preStop"):
            self._run(pod, {**container, "name": "pre-stop", "command": hook["exec"]["command"]}).wait(grace)
        process.terminate()
        try:
            code = process.wait(grace - (time.monotonic() - began))
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        del self.pods[pod.name]
        return code, time.monotonic() - began

    def run(self, workload: str) -> str:
        """Runs a Pod that ends by itself, such as a test; returns what it printed. Fails unless it succeeds."""
        pod = self.start(workload)
        (name,) = pod.processes
        code = pod.processes[name].wait(READY_TIMEOUT_S)
        del self.pods[pod.name]
        assert code == 0, pod.log(name)
        return pod.log(name)

    def close(self) -> None:
        """Kills what is left."""
        self._closed.set()
        self._prober.join()
        left = [process for pod in self.pods.values() for process in pod.processes.values() if process.poll() is None]
        for process in left:
            process.terminate()
        for process in left:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    # Containers

    def _run(self, pod: Pod, container: Object) -> subprocess.Popen[bytes]:
        mounts = self._mounts(pod, container)
        variables = {key: _local(value, mounts) for key, value in self._variables(pod, container).items()}
        argv = [_expanded(word, variables) for word in [*container["command"], *container.get("args", ())]]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = IMAGE_ENVIRONMENT | {
            "PATH": path,
            "TMPDIR": _local("/tmp", mounts),
            "LD_PRELOAD": str(self._preload),
            "POD_HOSTS": str(self._hosts),
            "GRPC_DNS_RESOLVER": "native",  # gRPC's own asks DNS servers past the C library
        }
        environment |= {key: pod.address if value == "0.0.0.0" else value for key, value in variables.items()}
        with (pod.folder / f"{container['name']}.log").open("ab") as log:
            return subprocess.Popen(
                [_local(word, mounts) for word in argv],
                env=environment,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _variables(self, pod: Pod, container: Object) -> dict[str, str]:
        fields = {"metadata.name": pod.name, "metadata.namespace": self.name, "status.podIP": pod.address}
        variables: dict[str, str] = {}
        for item in container.get("env", ()):
            source = item.get("valueFrom", {})
            if "fieldRef" in source:
                value = fields[source["fieldRef"]["fieldPath"]]
            elif "secretKeyRef" in source:
                value = self._secrets[source["secretKeyRef"]["name"]][source["secretKeyRef"]["key"]]
            else:
                value = _expanded(item["value"], variables)
            variables[item["name"]] = value
        return variables

    def _mounts(self, pod: Pod, container: Object) -> dict[str, Path]:
        """Mount path to folder."""
        volumes = {volume["name"]: volume for volume in pod.template["spec"].get("volumes", ())}
        found = {}
        for mount in container.get("volumeMounts", ()):
            volume = volumes[mount["name"]]
            folder = pod.folder / volume["name"]
            if "persistentVolumeClaim" in volume:
                folder = self._claims[volume["persistentVolumeClaim"]["claimName"]]
            elif not folder.exists():
                folder.mkdir()
                for name, text in self._files(volume).items():
                    (folder / name).write_text(text)
            if mount["mountPath"] != "/dev/shm":  # this machine's own serves
                found[mount["mountPath"]] = folder
        return found

    def _files(self, volume: Object) -> dict[str, str]:
        if "configMap" in volume:
            name = volume["configMap"]["name"]
            return next(dict(item["data"]) for item in self._of_kind("ConfigMap") if item["metadata"]["name"] == name)
        if "secret" in volume:
            return self._secrets[volume["secret"]["secretName"]]
        return {}

    # Services and probes

    def _of_kind(self, kind: str) -> list[Object]:
        return [item for item in self.objects if item["kind"] == kind]

    def addresses(self, service: str) -> list[str]:
        """The addresses that a Service's name has now."""
        (item,) = (item for item in self._of_kind("Service") if item["metadata"]["name"] == service)
        early = item["spec"].get("publishNotReadyAddresses", False)
        return [
            pod.address
            for pod in self.pods.values()
            if matches(item["spec"]["selector"], pod.labels) and (early or (pod.is_ready and not pod.is_leaving))
        ]

    def _write_hosts(self) -> None:
        with self._lock:
            lines = []
            for item in self._of_kind("Service"):
                service = item["metadata"]["name"]
                lines += [f"{address} {service}" for address in self.addresses(service)]
            lines += [f"{pod.address} {pod.name}.{pod.subdomain}" for pod in self.pods.values() if pod.subdomain]
            # Renamed into place: readers see the old names or the new ones.
            fresh = self._hosts.with_suffix(".new")
            fresh.write_text("\n".join([*lines, ""]))
            fresh.rename(self._hosts)

    def _probe_all(self) -> None:
        """Startup gates the others, as in kubelet; periods are shorter, and one failure counts."""
        started: set[str] = set()
        while not self._closed.wait(PROBE_PAUSE_S):
            with self._lock:
                pods = [pod for pod in self.pods.values() if pod.processes]
            for pod in pods:
                for container in pod.template["spec"]["containers"]:
                    if "startupProbe" not in container or pod.processes[container["name"]].poll() is not None:
                        continue
                    if pod.address not in started:
                        if _succeeds(pod, container["startupProbe"]):
                            started.add(pod.address)
                        continue
                    if not _succeeds(pod, container["livenessProbe"]) and not pod.is_leaving:
                        pod.failed_probes.append("livenessProbe")
                    ready = _succeeds(pod, container["readinessProbe"])
                    if ready != pod.is_ready:
                        pod.is_ready = ready
                        self._write_hosts()


def _succeeds(pod: Pod, probe: Object) -> bool:
    request = health_pb2.HealthCheckRequest(service=probe["grpc"].get("service", ""))
    with grpc.insecure_channel(f"{pod.address}:{probe['grpc']['port']}") as channel:
        try:
            response = health_pb2_grpc.HealthStub(channel).Check(request, timeout=probe["timeoutSeconds"])
        except grpc.RpcError:
            return False
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    """$(NAME) as Kubernetes does it."""
    return re.sub(r"\$\((\w+)\)", lambda match: variables.get(match[1], match[0]), text)


def _local(text: str, mounts: Mapping[str, Path]) -> str:
    """A path below a mount as the folder behind it; other text as it is."""
    for path, folder in mounts.items():
        if text == path or text.startswith(f"{path}/"):
            return f"{folder}{text[len(path) :]}"
    return text
