"""Looks at a machine the way a deployment will meet it, and says what to do about what is wrong.

Each check gives findings: ``ok`` with the facts, ``warn`` for what costs speed or will matter later, ``fail`` for what
keeps twinpool from starting or serving. Nothing is changed; ports are bound for a moment, and the KV connector reads
once from its own memory.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import resource
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from twinpool.config import Config, PoolSection
from twinpool.errors import ConfigError, TwinpoolError
from twinpool.port_holder import listener
from twinpool.port_picker import PortPicker

Level = Literal["ok", "warn", "fail"]
GIB = 1 << 30
PACKAGES = ("torch", "grpcio", "protobuf", "tokenizers", "llguidance", "nixl", "ray", "triton")
LEAST_SHM = 1 * GIB


@dataclass(frozen=True, slots=True)
class Finding:
    """``remedy`` is empty where nothing is to be done."""

    level: Level
    subject: str
    text: str
    remedy: str = ""


def examine(config: Config, role: Literal["all", "router", "prefill", "decode"], model: Path | None) -> list[Finding]:
    """Runs the checks that matter for what is to run here: ``all`` for ``twinpool up``, or one process.

    ``model`` is the model's folder, None if it could not be had.
    """
    findings = [*versions()]
    findings += ports(config, role)
    if role == "router":
        return findings
    pools = {"prefill": config.prefill, "decode": config.decode}
    chosen = {name: pool for name, pool in pools.items() if role in ("all", name)}
    together = sum(pool.replicas for pool in chosen.values()) if role == "all" else 1
    findings += devices(config, chosen, together)
    findings += shared_memory()
    findings += transport(config)
    findings += ray(config)
    for name, pool in chosen.items():
        findings += fits(config, name, pool, model, together)
    return findings


def versions() -> Iterator[Finding]:
    """The interpreter and the packages that matter."""
    yield Finding("ok", "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    found = []
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append(f"{name} {metadata.version(name)}")
    yield Finding("ok", "packages", ", ".join(found))
    if importlib.util.find_spec("torch") is None:
        yield Finding("fail", "packages", "torch is not installed: no worker can run", "pip install 'twinpool[worker]'")


def devices(config: Config, pools: dict[str, PoolSection], together: int) -> Iterator[Finding]:
    """Cores and GPUs against what the pools ask for."""
    if importlib.util.find_spec("torch") is None:
        return
    from twinpool.engine.memory import gpus

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found = gpus()
    names = ", ".join(f"{name} ({num_bytes / GIB:.0f} GiB)" for name, num_bytes in found)
    yield Finding("ok", "devices", f"{cores} CPU cores; " + (f"{len(found)} GPUs: {names}" if found else "no GPU"))
    wanted = sum(pool.tp_size * pool.pp_size * (pool.replicas if together > 1 else 1) for pool in pools.values())
    if config.model.device == "cuda" and wanted > len(found):
        yield Finding(
            "fail",
            "devices",
            f"the pools need {wanted} GPUs, torch sees {len(found)}",
            "lower replicas, tp_size or pp_size",
        )
    if config.model.device != "cuda" and not found:
        threads = sum(
            pool.engine.threads * pool.tp_size * pool.pp_size * (pool.replicas if together > 1 else 1)
            for pool in pools.values()
        )
        if threads > cores:
            yield Finding(
                "warn",
                "devices",
                f"{threads} computing threads share {cores} cores",
                "lower replicas or engine.threads: threads that wait for cores slow each other down",
            )


def shared_memory() -> Iterator[Finding]:
    """What NIXL's shared memory, and pinned memory for RDMA, need of the system."""
    path = Path("/dev/shm")
    if not path.is_dir():
        yield Finding("warn", "shared memory", "/dev/shm is missing: KV between local workers travels by TCP")
        return
    usage = shutil.disk_usage(path)
    text = f"/dev/shm has {usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free"
    if usage.free < LEAST_SHM:
        yield Finding("warn", "shared memory", text, "give it 1 GiB or more (--shm-size, or a memory volume)")
    else:
        yield Finding("ok", "shared memory", text)
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    with contextlib.suppress(OSError, ValueError):
        if int(scope.read_text()) > 0 and os.geteuid() != 0:
            yield Finding(
                "warn",
                "shared memory",
                "kernel.yama.ptrace_scope forbids reading another process's memory: UCX copies more often",
                "sysctl kernel.yama.ptrace_scope=0, or grant CAP_SYS_PTRACE",
            )
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY and Path("/sys/class/infiniband").is_dir():
        yield Finding(
            "warn",
            "locked memory",
            f"the limit is {soft / GIB:.2f} GiB: RDMA cannot register more KV",
            "ulimit -l unlimited",
        )


def transport(config: Config) -> Iterator[Finding]:
    """The KV connector: made as a worker makes it, and one read from our own memory."""
    if importlib.util.find_spec("torch") is None:
        return
    from twinpool.kv_transfer.connectors.base import ConnectorError
    from twinpool.kv_transfer.layout import KVLayout, RankLayout
    from twinpool.worker.rank_setup import choose_device, make_rank_connector, self_transfer

    settings = config.transport
    asked = ", ".join(
        f"{name} {value}"
        for name, value in (("ucx_tls", settings.ucx_tls), ("ucx_net_devices", settings.ucx_net_devices))
        if value
    )
    try:
        connector = make_rank_connector(config, config.prefill)
        try:
            layout = RankLayout.whole(KVLayout(1, 1, 64, 16, "float32"))
            connector.allocate(2 * layout.block_bytes, choose_device("cpu", 0, 1))
            self_transfer(connector, layout)
        finally:
            connector.close()
    except ConnectorError as error:
        yield Finding("fail", "transport", str(error))
        return
    yield Finding("ok", "transport", f"{connector.name} reads its own memory" + (f" ({asked})" if asked else ""))
    adapters = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    if adapters:
        yield Finding("ok", "transport", f"RDMA adapters: {', '.join(adapters)}")
    elif settings.require and "rdma" in settings.require:
        yield Finding(
            "fail", "transport", "transport.require wants rdma, but this machine has no RDMA adapter", "lower it"
        )
    if connector.name != "nixl" and settings.connector == "auto":
        yield Finding("warn", "transport", "nixl is not installed: KV travels by TCP", "pip install 'twinpool[nixl]'")


def ports(config: Config, role: str) -> Iterator[Finding]:
    """Whether what is to listen here can."""
    router, wanted = config.router, []
    if role in ("all", "router"):
        wanted.append(("router.grpc_port", router.host, router.grpc_port))
        wanted.append(("router.http_port", router.host, router.http_port))
    for name, pool in (("prefill", config.prefill), ("decode", config.decode)):
        if role == name:
            wanted += [(f"{name}.port", pool.host, pool.port)]
    with contextlib.closing(PortPicker()) as picker:
        for key, host, port in wanted:
            if port == 0:
                continue
            try:
                picker.take(host, port, key, "stop the program that uses it, or choose another port")
            except ConfigError as error:
                holder = listener(port)
                if holder is None or not holder.is_twinpool:
                    yield Finding("fail", "ports", error.message)
                else:
                    text = f"{key} {host}:{port} is held by a twinpool that runs: {holder.command} (pid {holder.pid})"
                    yield Finding("warn", "ports", text, "stop it before you start another, or choose another port")
            else:
                yield Finding("ok", "ports", f"{key} {host}:{port} is free")


def ray(config: Config) -> Iterator[Finding]:
    """Whether Ray is there, where a pool wants it, and answers."""
    if "ray" not in (config.prefill.launcher, config.decode.launcher, config.controller.launcher):
        return
    if importlib.util.find_spec("ray") is None:
        text = "ray is to launch workers or ranks, but is not installed"
        yield Finding("fail", "ray", text, "pip install 'twinpool[ray]'")
        return
    address = config.ray.address
    if address is None or ":" not in address:
        yield Finding("ok", "ray", f"ray {metadata.version('ray')}; the leader starts a cluster of its own")
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=3).close()
    except (OSError, ValueError) as error:
        yield Finding("fail", "ray", f"no Ray head at {address}: {error}", "start it, or correct ray.address")
    else:
        yield Finding("ok", "ray", f"a Ray head listens at {address}")


def fits(config: Config, name: str, pool: PoolSection, model: Path | None, together: int) -> Iterator[Finding]:
    """Weights and KV of each rank against memory, with the numbers."""
    if model is None or importlib.util.find_spec("torch") is None:
        return
    from twinpool.engine.errors import UnsupportedModel
    from twinpool.engine.fit import fit
    from twinpool.engine.memory import available_bytes
    from twinpool.engine.shard import CPU_KV_BYTES, CUDA_KV_SHARE
    from twinpool.worker.rank_setup import choose_device, kv_memory_bytes

    section = pool.engine
    try:
        device = choose_device(config.model.device, 0, 1)
        ranks = fit(
            model,
            dtype=config.model.dtype,
            tp_size=pool.tp_size,
            pp_size=pool.pp_size,
            block_size=section.block_size,
        )
    except (UnsupportedModel, TwinpoolError) as error:
        yield Finding("fail", f"model ({name})", str(error))
        return
    available = available_bytes(device)
    heaviest = max(ranks, key=lambda rank: rank.weight_bytes)
    room = (available or 0) - heaviest.weight_bytes
    share = CPU_KV_BYTES if device.type == "cpu" else int(max(room, 0) * CUDA_KV_SHARE)
    kv_bytes = (kv_memory_bytes(section) or share) if section.num_blocks is None else 0
    blocks = section.num_blocks or min(kv_bytes // rank.block_bytes for rank in ranks)
    kv_bytes = blocks * max(rank.block_bytes for rank in ranks)
    tokens = (blocks - 1) * section.block_size
    # Local ranks on CPU share the memory; each GPU has its own.
    sharing = (len(ranks) * together) if device.type == "cpu" and pool.launcher == "local" else 1
    needed = sharing * (heaviest.weight_bytes + kv_bytes)
    text = (
        f"{len(ranks)} rank(s) of {heaviest.weight_bytes / GIB:.2f} GiB of weights and {kv_bytes / GIB:.2f} GiB of KV "
        f"({blocks} blocks, {tokens} tokens) on {device}"
    )
    if available is not None and needed > available:
        yield Finding(
            "fail",
            f"model ({name})",
            f"{text}: {needed / GIB:.2f} GiB in all, {available / GIB:.2f} GiB are free",
            "raise tp_size or pp_size, lower kv_memory_gib or replicas, or take a smaller model or dtype",
        )
    else:
        free = "" if available is None else f"; {available / GIB:.2f} GiB are free"
        yield Finding("ok", f"model ({name})", text + free)
