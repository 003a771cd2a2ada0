"""`twinpool doctor`: facts, failures with remedies, exit codes."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from twinpool.config import Config
from twinpool.doctor import Finding, examine, fits, ports, ray
from twinpool.engine.fit import fit
from twinpool.port_holder import listener


def config(**sections: Any) -> Config:
    free = {"grpc_port": 0, "http_port": 0}
    return Config.model_validate({"router": free, "model": {"dtype": "float32"}, **sections})


def of(findings: Any, level: str) -> list[Finding]:
    return [finding for finding in findings if finding.level == level]


def test_a_machine_that_will_do(tiny_llama: Path) -> None:
    findings = examine(config(), "all", tiny_llama)
    assert of(findings, "fail") == []
    subjects = {finding.subject for finding in findings}
    assert {"python", "packages", "devices", "transport", "model (prefill)", "model (decode)"} <= subjects
    assert any("reads its own memory" in finding.text for finding in findings)


def test_ranks_share_the_weights(tiny_llama: Path) -> None:
    (whole,) = fit(tiny_llama, dtype="float32", tp_size=1, pp_size=1, block_size=16)
    halves = fit(tiny_llama, dtype="float32", tp_size=2, pp_size=1, block_size=16)
    stages = fit(tiny_llama, dtype="float32", tp_size=1, pp_size=2, block_size=16)
    assert all(half.weight_bytes < whole.weight_bytes for half in halves)
    assert sum(stage.weight_bytes for stage in stages) >= whole.weight_bytes
    assert sum(stage.block_bytes for stage in stages) == whole.block_bytes
    (half_precision,) = fit(tiny_llama, dtype="bfloat16", tp_size=1, pp_size=1, block_size=16)
    assert half_precision.weight_bytes * 2 == whole.weight_bytes


def test_what_does_not_fit_is_told_with_the_numbers(tiny_llama: Path) -> None:
    asked = config(decode={"engine": {"kv_memory_gib": 100_000}})
    (finding,) = of(fits(asked, "decode", asked.decode, tiny_llama, 1), "fail")
    assert "100000.00 GiB of KV" in finding.text
    assert "kv_memory_gib" in finding.remedy
    cut = config(decode={"pp_size": 9})
    (finding,) = of(fits(cut, "decode", cut.decode, tiny_llama, 1), "fail")
    assert "pp_size 9" in finding.text


def test_a_port_in_use_and_a_ray_head_that_is_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        asked = config(router={"grpc_port": port, "http_port": 0})
        (finding,) = of(ports(asked, "router"), "fail")
        assert str(port) in finding.text
    away = config(ray={"address": f"127.0.0.1:{port}"}, decode={"launcher": "ray"})
    (finding,) = of(ray(away), "fail")
    assert f"127.0.0.1:{port}" in finding.text


def test_a_port_that_a_running_twinpool_holds() -> None:
    """It is no fault of the machine; who holds it is told."""
    hold = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"
    command = [sys.executable, "-c", hold, "/usr/bin/twinpool", "serve", "router", "--config", "x"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        findings = list(ports(config(router={"grpc_port": port, "http_port": 0}), "all"))
        assert of(findings, "fail") == []
        (finding,) = of(findings, "warn")
        assert f"twinpool serve router (pid {process.pid})" in finding.text
        assert finding.remedy
        process.communicate("\n")
    assert listener(port) is None


def test_the_command_fails_with_what_it_found() -> None:
    command = [sys.executable, "-P", "-m", "twinpool", "doctor", "router", "--model", "/no/such/folder", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert not found["ok"]
    assert "/no/such/folder" in next(item["text"] for item in found["findings"] if item["level"] == "fail")
