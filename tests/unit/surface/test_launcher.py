"""What ``twinpool up`` would start: ports, settings of each process, and where the token travels."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest

from twinpool.config_loader import load
from twinpool.errors import ConfigError
from twinpool.launcher import Plan, prepare
from twinpool.port_picker import PortPicker
from twinpool.progress import Progress


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    return tmp_path


def plan(folder: Path, **settings: str) -> Plan:
    flags = {"model.path": ("test", str(folder)), "router.http_port": ("test", "0"), "router.grpc_port": ("test", "0")}
    flags |= {key.replace("__", "."): ("test", value) for key, value in settings.items()}
    return prepare(load(None, flags, {}).config, Progress())


def settings_of(argv: tuple[str, ...]) -> dict[str, str]:
    return dict(argv[index + 1].split("=", 1) for index, word in enumerate(argv) if word == "--set")


def test_processes_get_ports_identities_and_each_other(folder: Path) -> None:
    found = plan(folder, prefill__replicas="2")
    assert [spec.name for spec in found.specs] == ["router", "prefill-0", "prefill-1", "decode-0"]
    router, *workers = found.specs
    assert load(environ=router.environment).config.router.discovery == "controller"
    assert settings_of(workers[1].argv)["prefill.worker_id"] == "prefill-1"
    ports = [found.config.router.http_port, found.config.router.grpc_port, found.config.controller.known_port]
    for spec in workers:
        ports += [int(value) for key, value in settings_of(spec.argv).items() if key.endswith("port")]
    assert len(ports) == len(set(ports)) == 8
    assert 0 not in ports


def test_fixed_pool_ports_count_up(folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        first = free.getsockname()[1]
    try:
        found = plan(folder, decode__replicas="2", decode__port=str(first))
    except ConfigError:
        pytest.skip("another program took the neighbouring port")
    assert [spec.address for spec in found.specs[2:]] == [f"127.0.0.1:{first}", f"127.0.0.1:{first + 1}"]


def test_children_see_the_plan_and_not_the_users_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINPOOL_CONFIG", "/somewhere.yaml")
    monkeypatch.setenv("TWINPOOL_DECODE__REPLICAS", "5")
    found = plan(folder, session__token="hush", model__dtype="float32")
    for spec in found.specs:
        assert "TWINPOOL_CONFIG" not in spec.environment
        assert "TWINPOOL_DECODE__REPLICAS" not in spec.environment
        config = load(environ=spec.environment).config
        assert config == found.config
        assert not any("hush" in word for word in spec.argv)
    assert found.config.model.path == str(folder.resolve())
    assert found.config.model.name == folder.name


def test_ports_are_free_again_when_the_processes_start(folder: Path) -> None:
    for spec in plan(folder).specs:
        host, port = spec.address.rsplit(":", 1)
        with socket.socket() as listener:
            listener.bind((host, int(port)))


def test_ports_that_nobody_asked_for_give_way(folder: Path) -> None:
    with contextlib.closing(PortPicker()) as others:
        free = str(others.take("127.0.0.1", 0, "", ""))
        others.prefer("127.0.0.1", 8101, "", "")  # taken now, by this or another program
        others.prefer("127.0.0.1", 8200, "", "")
        with pytest.raises(ConfigError, match=r"router.grpc_port\) cannot be used"):
            plan(folder, router__grpc_port=free)
        with pytest.raises(ConfigError, match=r"controller.port\) cannot be used"):
            plan(folder, controller__port=free)
    with contextlib.closing(PortPicker()) as others:
        others.prefer("127.0.0.1", 8101, "", "")
        others.prefer("127.0.0.1", 8200, "", "")
        found = plan(folder, router__grpc_port=free).config
    assert found.router.known_admin_port != 8101
    assert found.controller.known_port != 8200


def test_pools_that_cannot_serve_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"router\.workers is set"):
        plan(folder, router__workers="a:1")
