"""Where models come from, and what is said when they do not."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from twinpool.config import ModelConfig
from twinpool.errors import ConfigError
from twinpool.model_source import model_name, resolve_model
from twinpool.progress import Progress


def fill(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("{}")
    return folder


def test_local_folder(tmp_path: Path) -> None:
    folder = fill(tmp_path / "tiny", "config.json", "tokenizer.json", "model-00001-of-00002.safetensors")
    assert resolve_model(ModelConfig(path=str(folder)), Progress()) == folder.resolve()
    assert model_name(ModelConfig(path=f"{folder}/")) == "tiny"
    assert model_name(ModelConfig(path=str(folder), name="mine")) == "mine"


def test_a_router_needs_no_weights(tmp_path: Path) -> None:
    folder = fill(tmp_path / "tiny", "config.json", "tokenizer.json")
    assert resolve_model(ModelConfig(path=str(folder)), Progress(), with_weights=False) == folder.resolve()
    with pytest.raises(ConfigError, match=r"lacks \*.safetensors"):
        resolve_model(ModelConfig(path=str(folder)), Progress())


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/no/such", "/no/such does not exist"),
        ("./none", "does not exist"),
        ("a/b/c", "a/b/c does not exist"),
        (__file__, "is a file"),
        ("{}", "lacks config.json and tokenizer.json and"),
    ],
)
def test_what_is_wrong_with_a_path(path: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_model(ModelConfig(path=path.format(tmp_path)), Progress())


def test_hub_id_fetches_only_what_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = {}
    folder = fill(tmp_path / "0123abcd", "config.json", "tokenizer.json", "model.safetensors")

    def download(name: str, **arguments: object) -> str:
        asked.update(arguments, name=name)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    model = ModelConfig(path="owner/name", revision="v2")
    assert resolve_model(model, Progress()) == folder.resolve()
    assert (asked["name"], asked["revision"]) == ("owner/name", "v2")
    assert "*.safetensors" in asked["allow_patterns"]
    assert "*.bin" not in asked["allow_patterns"]
    assert resolve_model(model, Progress(), with_weights=False) == folder.resolve()
    assert "*.safetensors" not in asked["allow_patterns"]
    assert model_name(model) == "owner/name"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (LocalEntryNotFoundError("offline"), "check the network"),
        (ConnectionResetError("reset"), "check the network"),
        (HFValidationError("bad name"), "there is no model owner/name"),
    ],
)
def test_hub_errors_are_one_line_with_a_remedy(monkeypatch: pytest.MonkeyPatch, error: Exception, message: str) -> None:
    def download(name: str, **arguments: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_model(ModelConfig(path="owner/name"), Progress())
    assert "\n" not in caught.value.message
