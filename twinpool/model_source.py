"""Finds the model to serve: the demo model, a local Hugging Face folder, or a hub id; always ends in a folder."""

from __future__ import annotations

from pathlib import Path

from twinpool import demo_model
from twinpool.config import ModelConfig
from twinpool.errors import ConfigError
from twinpool.progress import Progress

DEMO = "demo"
_TEXT_FILES = ["*.json", "*.jinja", "tokenizer.model"]
_WEIGHTS = "*.safetensors"


def model_name(model: ModelConfig) -> str:
    """The name that requests use: the configured one, else the folder's or the hub id."""
    if model.name is not None:
        return model.name
    if model.path == DEMO:
        return demo_model.NAME
    folder = Path(model.path).expanduser()
    return folder.resolve().name if folder.is_dir() else model.path


def resolve_model(model: ModelConfig, progress: Progress, with_weights: bool = True) -> Path:
    """The folder that holds the model; downloads it if need be. A router needs it without weights.

    Raises:
        ConfigError: there is no such model, it cannot be downloaded, or the folder lacks a file.
    """
    if model.path == DEMO:
        return demo_model.demo_folder(progress)
    folder = Path(model.path).expanduser()
    if folder.exists() or _is_path(model.path):
        return _check_folder(folder, model.path, with_weights)
    fetched = _from_hub(model.path, model.revision, progress, with_weights)
    return _check_folder(fetched, model.path, with_weights)


def _is_path(text: str) -> bool:
    """Whether ``text`` can only be a path: a hub id is ``name`` or ``owner/name``."""
    return text.startswith((".", "/", "~")) or text.count("/") != 1


def _check_folder(folder: Path, given: str, with_weights: bool) -> Path:
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ConfigError(
            f"the model folder {given} {what}; give a Hugging Face folder, a hub id (owner/name), or demo (--model)"
        )
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    if with_weights and not any(folder.glob(_WEIGHTS)):
        missing.append(_WEIGHTS)
    if missing:
        raise ConfigError(
            f"the model {given} lacks {' and '.join(missing)}; give a Hugging Face folder with config.json, "
            "tokenizer.json and safetensors weights (--model)"
        )
    return folder.resolve()


def _from_hub(name: str, revision: str | None, progress: Progress, with_weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    progress.note(f"Fetching {name} from the Hugging Face hub")
    patterns = [*_TEXT_FILES, _WEIGHTS] if with_weights else _TEXT_FILES
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except GatedRepoError as error:
        cause = "its licence must be accepted first; accept it on the model's page and set HF_TOKEN"
        raise ConfigError(f"the model {name} is gated: {cause}") from error
    except RevisionNotFoundError as error:
        raise ConfigError(
            f"the model {name} has no revision {revision}; correct model.revision or leave it out"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ConfigError(
            f"there is no model {name}, neither as a folder here nor on the Hugging Face hub (or it is private); "
            "correct --model, or set HF_TOKEN"
        ) from error
    except Exception as error:  # of a network: their classes differ between versions of the hub library
        raise ConfigError(
            f"the model {name} is no folder here and cannot be fetched from the Hugging Face hub "
            f"({type(error).__name__}); check the network, or give a local folder (--model)"
        ) from error
