"""A Ray cluster of several nodes on this machine, on loopback, in a process and a temporary folder of its own.

The head node offers nothing but a place for drivers; its state is on disk, so that it can die and come back. As a
script this file is the process that holds the nodes: it obeys the words on its standard input, and ends with it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from processes import children, command, marked, parent

HOST = "127.0.0.1"
OBJECT_STORE_BYTES = 80 << 20


class RayCluster:
    """A head and worker nodes: (its label ``pool``, its number of processors) for each."""

    def __init__(self, nodes: Sequence[tuple[str, int]]) -> None:
        self.folder = tempfile.mkdtemp(prefix="rc")  # sockets in it need a short path
        self.environment = os.environ | {
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DEDUP_LOGS": "0",
            "RAY_memory_monitor_refresh_ms": "0",
            "RAY_TMPDIR": self.folder,
            "RAY_gcs_storage": "rocksdb",
            "RAY_gcs_storage_path": f"{self.folder}/gcs",
            "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__, *(f"{pool}={cpus}" for pool, cpus in nodes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=self.environment,
            text=True,
        )
        self.address = self._read()

    def kill_head(self) -> None:
        """Kills the head's server, without a word to anybody."""
        assert self._say("kill") == "killed"

    def start_head(self) -> None:
        """Starts the head's server again at its address."""
        assert self._say("start") == "started"

    def stop(self) -> None:
        self._process.communicate(timeout=60)
        shutil.rmtree(self.folder, ignore_errors=True)

    def workers(self) -> dict[str, list[int]]:
        """The worker processes (`twinpool serve`) by the label ``pool`` of the node that they run on."""
        found: dict[str, list[int]] = {}
        for raylet, pool in self._raylets().items():
            pids = [pid for actor in children(raylet) for pid in children(actor) if "twinpool serve" in command(pid)]
            found.setdefault(pool, []).extend(pids)
        return found

    def ranks(self) -> list[int]:
        """The processes of ranks above 0: the children of their keepers."""
        keepers = [pid for pid in self.processes() if "rank_keeper" in command(pid)]
        return [pid for pid in keepers if parent(pid) in keepers]

    def node_of(self, pid: int) -> int:
        """The node (its raylet) that runs a process."""
        raylets = self._raylets()
        while pid not in raylets:
            pid = parent(pid)
            assert pid > 1
        return pid

    def processes(self) -> list[int]:
        """All that was started for this cluster or on it, whoever their parents are by now."""
        return marked("RAY_TMPDIR", self.folder)

    def _raylets(self) -> dict[int, str]:
        found: dict[int, str] = {}
        for raylet in children(self._process.pid):
            match = re.search(r'"pool": "(\w+)"', command(raylet))
            if match is not None and "raylet" in command(raylet):
                found[raylet] = match[1]
        return found

    def log(self) -> str:
        """What the replicas' actors and their workers have printed."""
        files = sorted(Path(self.folder).glob("ray/session_latest/logs/worker-*.out"))
        return "\n".join(file.read_text(errors="replace") for file in files)

    def _say(self, word: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("> "):
                return line.removeprefix("> ").strip()
        raise AssertionError("the Ray cluster does not start")


def main(nodes: Sequence[str]) -> None:
    """The process that holds the nodes."""
    from ray.cluster_utils import Cluster

    common = {"node_ip_address": HOST, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={**common, "num_cpus": 0, "labels": {"pool": "none"}})
    for node in nodes:
        pool, _, cpus = node.partition("=")
        cluster.add_node(**common, num_cpus=int(cpus), labels={"pool": pool})
    print(f"> {cluster.address}", flush=True)
    for line in sys.stdin:
        match line.strip():
            case "kill":
                cluster.head_node.kill_gcs_server()
                print("> killed", flush=True)
            case "start":
                cluster.head_node.start_gcs_server()
                print("> started", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
