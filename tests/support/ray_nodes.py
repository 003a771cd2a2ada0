"""A Ray cluster of several nodes on this machine, on loopback, in a temporary folder of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field

from clusters import free_ports
from twinpool.config import Config
from twinpool.worker.ray_environment import node_environment

HOST = "127.0.0.1"


@dataclass
class RayNodes:
    """Nodes of one CPU each, the head first; they end with their standard inputs."""

    mark: dict[str, str]
    folder: str = field(default_factory=lambda: tempfile.mkdtemp(prefix="rn"))  # sockets in it need a short path
    address: str = ""
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        return node_environment(Config(), HOST) | self.mark | {"RAY_TMPDIR": self.folder}

    def start(self, count: int) -> None:
        self.address = self._launch("--head-port", str(free_ports(1)[0]))
        for number in range(1, count):
            self._launch("--join", self.address, "--label", f"number={number}")

    def _launch(self, *where: str) -> str:
        argv = [sys.executable, "-P", "-m", "twinpool.worker.ray_node", "--host", HOST, *where, "--cpus", "1"]
        argv += ["--object-store-mib", "80"]
        for _attempt in range(3):  # Ray waits 30 s for its own processes, which is not always enough on a busy machine
            process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=self.environment)
            assert process.stdout is not None
            word, _, address = process.stdout.readline().decode().strip().partition(" ")
            if word == "ready":
                self.processes.append(process)
                return address
            process.wait()
        raise AssertionError("a Ray node does not start")

    def run(self, code: str, namespace: str) -> str:
        """Runs Python in a driver that is connected as ``ray``; returns what it prints."""
        connect = f"import ray; ray.init({self.address!r}, namespace={namespace!r}, logging_level='ERROR')\n"
        argv = [sys.executable, "-P", "-c", connect + code]
        return subprocess.run(argv, env=self.environment, capture_output=True, text=True, check=True, timeout=60).stdout

    def stop(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.processes:
            process.wait(20)
        shutil.rmtree(self.folder, ignore_errors=True)
