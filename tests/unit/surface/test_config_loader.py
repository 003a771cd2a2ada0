"""Precedence, provenance, and errors that name the place and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from twinpool.config import Config
from twinpool.config_loader import KEYS, describe, load, to_environment, to_text, value_at
from twinpool.errors import ConfigError


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "twinpool.yaml"
    file.write_text(text)
    return file


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = write(tmp_path, "router:\n  http_port: 1\n  grpc_port: 1\n  max_queued: 1\n")
    environment = {"TWINPOOL_ROUTER__HTTP_PORT": "2", "TWINPOOL_ROUTER__GRPC_PORT": "2"}
    loaded = load(file, {"router.http_port": ("--http-port", "3")}, environment)
    router = loaded.config.router
    assert (router.http_port, router.grpc_port, router.max_queued, router.max_attempts) == (3, 2, 1, 20)
    assert loaded.sources["router.http_port"] == "--http-port"
    assert loaded.sources["router.grpc_port"] == "environment TWINPOOL_ROUTER__GRPC_PORT"
    assert loaded.sources["router.max_queued"] == f"{file}:4"
    assert loaded.sources["router.max_attempts"] == "default"


def test_file_named_by_the_environment(tmp_path: Path) -> None:
    file = write(tmp_path, "decode:\n  engine:\n    threads: 2\n")
    assert load(environ={"TWINPOOL_CONFIG": str(file)}).config.decode.engine.threads == 2


def test_text_becomes_lists_and_null() -> None:
    environment = {"TWINPOOL_ROUTER__WORKERS": "a:1, b:2", "TWINPOOL_MODEL__MAX_MODEL_LEN": "null"}
    config = load(environ=environment).config
    assert config.router.workers == ("a:1", "b:2")
    assert config.model.max_model_len is None


@pytest.mark.parametrize(
    ("flags", "environment", "parts"),
    [
        ({"router.htp_port": ("--set", "1")}, {}, ["--set", "router.htp_port", "did you mean router.http_port?"]),
        ({"http_port": ("--set", "1")}, {}, ["did you mean router.http_port?"]),
        ({}, {"TWINPOOL_ROUTER__HTTP_PROT": "1"}, ["TWINPOOL_ROUTER__HTTP_PROT", "mean TWINPOOL_ROUTER__HTTP_PORT?"]),
        ({"zzz.qqq": ("--set", "1")}, {}, ["config show"]),
        ({"router.http_port": ("--http-port", "x")}, {}, ["--http-port", "'x'", "expected a valid integer"]),
        ({"router.http_port": ("--http-port", "70000")}, {}, ["70000", "less than or equal to 65535"]),
        ({"router.workers": ("--workers", "a:1,node")}, {}, ["--workers", "'node' is no host:port"]),
        ({"router.disaggregate": ("--disaggregate", "no")}, {}, ["'no'", "'always', 'auto' or 'never'"]),
        ({}, {"TWINPOOL_SESSION__DEAD_AFTER_S": "0.5"}, ["session", "suspect_after_s", "must hold"]),
    ],
)
def test_wrong_key_or_value(flags: dict[str, tuple[str, str]], environment: dict[str, str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, flags, environment)
    assert "\n" not in caught.value.message
    for part in parts:
        assert part in caught.value.message


@pytest.mark.parametrize(
    ("text", "line", "parts"),
    [
        ("router:\n  http_port: 1\n  worker: []\n", 3, ["router.worker", "did you mean router.workers?"]),
        ("router:\n  http_port: 1\n  http_port: 2\n", 3, ["given twice"]),
        ("router: 5\n", 1, ["router must hold keys"]),
        ("router:\n  http_port: [\n", 3, ["not valid YAML"]),
        ("- a\n", 1, ["must hold keys"]),
        ("model:\n  dtype: int8\n", 2, ["model.dtype", "'int8'", "bfloat16"]),
    ],
)
def test_errors_in_files_name_file_and_line(tmp_path: Path, text: str, line: int, parts: list[str]) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load(file, environ={})
    for part in [f"{file}:{line}:", *parts]:
        assert part in caught.value.message


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load(tmp_path / "none.yaml", environ={})


def test_empty_file_and_empty_section(tmp_path: Path) -> None:
    assert load(write(tmp_path, "# nothing\n"), environ={}).config == Config()
    assert load(write(tmp_path, "router:\n#  http_port: 1\n"), environ={}).config == Config()


def test_variables_of_kubernetes_are_not_ours() -> None:
    assert load(environ={"TWINPOOL_ROUTER_SERVICE_HOST": "10.0.0.1", "TWINPOOL_CACHE": "/x"}).config == Config()


def test_environment_carries_every_configuration() -> None:
    settings = {
        "router.workers": ("f", "a:1,b:2"),
        "prefill.engine.prefix_caching": ("f", "false"),
        "session.token": ("f", "s e=cret"),
        "model.max_model_len": ("f", "77"),
        "transport.ucx_tls": ("f", "tcp,shm"),
    }
    config = load(None, settings, {}).config
    assert load(environ=to_environment(config)).config == config


def test_secrets_are_masked_and_keys_described() -> None:
    shown = {key: value for key, value, _ in load(environ={"TWINPOOL_SESSION__TOKEN": "hush"}).items()}
    assert shown["session.token"] == "***"
    assert shown.keys() == KEYS.keys()
    for key in KEYS:
        assert describe(key), f"{key} lacks a description"
        assert to_text(value_at(Config(), key)) is not None
