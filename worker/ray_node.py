"""The process of a Ray node of ours: the head of a cluster, or a node that joins one.

1. It starts Ray's own processes as its children and prints ``ready HOST:PORT`` (of the head).
2. It blocks until its standard input ends, which is how its parent ends it, alive or dead (exit code 0), or until the
   GCS or the raylet has ended (1).
3. Whatever is left of Ray's processes is killed (see ``ray_session``). Ranks are not among them. If this process is
   killed, so are Ray's, by the kernel, but for what ``ray_session`` says; its parent sees to that.

No dashboard, no autoscaler, no Ray client server: what is not started does not listen. ``ray start`` cannot put several
nodes on one loopback address; Ray's ``Node`` can, which is what its own test clusters use.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import ray._private.node
import ray._private.parameter

from twinpool.worker.ray_session import kill_session


def main() -> int:
    """Entry point; see the module. The environment is ``ray_environment.own_environment``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", required=True)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--head-port", type=int)
    where.add_argument("--join")
    parser.add_argument("--cpus", type=int)
    parser.add_argument("--object-store-mib", type=int, required=True)
    parser.add_argument("--label", action="append", default=[])
    arguments = parser.parse_args()
    if os.getsid(0) != os.getpid():
        os.setsid()
    node = _start(arguments)
    print(f"ready {node.gcs_address}", flush=True)
    code = _until_end(node)
    node.kill_all_processes(check_alive=False, allow_graceful=code == 0)
    kill_session(os.getpid())
    return code


def _start(arguments: argparse.Namespace) -> Any:
    is_head = arguments.join is None
    parameters = ray._private.parameter.RayParams(
        node_ip_address=arguments.host,
        gcs_address=arguments.join,
        gcs_server_port=arguments.head_port,
        num_cpus=arguments.cpus,
        object_store_memory=arguments.object_store_mib << 20,
        node_manager_port=0,
        min_worker_port=0,
        max_worker_port=0,
        dashboard_agent_listen_port=0,
        include_dashboard=False,
        no_monitor=True,
        labels=dict(label.split("=", 1) for label in arguments.label),
    )
    return ray._private.node.Node(parameters, head=is_head, shutdown_at_exit=True, spawn_reaper=True)


def _until_end(node: Any) -> int:
    ended = threading.Event()
    codes: list[int] = []

    def watch(wait: Callable[[], object], code: int) -> None:
        wait()
        codes.append(code)
        ended.set()

    waits = [(info.process.wait, 1) for kind in ("gcs_server", "raylet") for info in node.all_processes.get(kind, [])]
    for wait, code in [*waits, (sys.stdin.buffer.read, 0)]:
        threading.Thread(target=watch, args=(wait, code), daemon=True).start()
    ended.wait()
    return codes[0]


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a thread may hold standard input
