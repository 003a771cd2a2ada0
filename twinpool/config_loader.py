"""Reads the configuration: flag > environment > file > default, each value with where it came from.

Flags are ``section.key`` to text; the environment is ``TWINPOOL_SECTION__KEY`` (``TWINPOOL_DECODE__ENGINE__THREADS``);
the file is one YAML document. Text from flags and environment is converted like YAML scalars of the key's type: a
list is comma-separated, ``null`` unsets an optional key.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from twinpool.config import Config
from twinpool.errors import ConfigError

_PREFIX = "TWINPOOL_"
_FILE_VARIABLE = "TWINPOOL_CONFIG"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration and, for each key (``router.http_port``), where its value came from."""

    config: Config
    sources: Mapping[str, str]

    def items(self) -> Iterator[tuple[str, Any, str]]:
        """Yields (key, value, source) for every key; secrets are masked."""
        for key in KEYS:
            value = value_at(self.config, key)
            yield key, "***" if key in SECRETS and value is not None else value, self.sources[key]


def _leaves(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _leaves(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", kind


KEYS: Mapping[str, Any] = dict(_leaves(Config))
SECRETS = frozenset({"session.token", "client.api_key", "auth.keys"})


def load(
    path: Path | None = None,
    flags: Mapping[str, tuple[str, str]] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Loaded:
    """Loads the configuration.

    Args:
        path: the YAML file; None takes the one that TWINPOOL_CONFIG names, if any.
        flags: key to (flag as typed, value as text).
        environ: environment; None takes the process's.

    Raises:
        ConfigError: an unknown key (naming the nearest known one), a bad value, or an unreadable file.
    """
    environ = os.environ if environ is None else environ
    origin = "--config"
    if path is None and (named := environ.get(_FILE_VARIABLE)):
        path, origin = Path(named).expanduser(), _FILE_VARIABLE
    values: dict[str, Any] = {}
    sources = dict.fromkeys(KEYS, "default")
    if path is not None:
        for key, value, source in _from_file(path, origin):
            values[key], sources[key] = value, source
    for variable in sorted(environ):
        # Kubernetes sets TWINPOOL_ROUTER_SERVICE_HOST and the like for its services; they never have "__".
        if variable.startswith(_PREFIX) and "__" in variable:
            key = variable.removeprefix(_PREFIX).lower().replace("__", ".")
            _check_key(key, variable, _variable)
            values[key], sources[key] = _from_text(key, environ[variable]), f"environment {variable}"
    for key, (flag, text) in (flags or {}).items():
        _check_key(key, flag, str)
        values[key], sources[key] = _from_text(key, text), flag
    return Loaded(_validate(values, sources), sources)


def value_at(config: Config, key: str) -> Any:
    """The value of a dotted key."""
    values: Any = config.model_dump()
    for part in key.split("."):
        values = values[part]
    return values


def describe(key: str) -> str:
    """What a dotted key means."""
    *sections, name = key.split(".")
    model: type[BaseModel] = Config
    for section in sections:
        inner = model.model_fields[section].annotation
        assert isinstance(inner, type)
        assert issubclass(inner, BaseModel)
        model = inner
    return model.model_fields[name].description or ""


def to_environment(config: Config) -> dict[str, str]:
    """The variables that give another process this configuration; defaults are left out."""
    default = Config()
    changed = {key: value_at(config, key) for key in KEYS if value_at(config, key) != value_at(default, key)}
    return {_variable(key): to_text(value) for key, value in changed.items()}


def to_text(value: Any) -> str:
    """A value as text for a flag or the environment."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def _variable(key: str) -> str:
    return _PREFIX + key.upper().replace(".", "__")


def _check_key(key: str, where: str, spell: Callable[[str], str]) -> None:
    if key in KEYS:
        return
    # A last part that is known elsewhere is the likelier slip than one letter of the section.
    near = difflib.get_close_matches(key, KEYS, n=1, cutoff=0.5)
    near = near or [known for known in KEYS if known.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]][:1]
    remedy = f"did you mean {spell(near[0])}?" if near else "`twinpool config show` lists all keys"
    raise ConfigError(f"{where}: unknown key {key}; {remedy}")


def _from_text(key: str, text: str) -> Any:
    kinds = get_args(KEYS[key])
    if NoneType in kinds and text.lower() in ("", "null", "none"):
        return None
    if get_origin(KEYS[key]) is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    return text


def _from_file(path: Path, origin: str) -> Iterator[tuple[str, Any, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(
            f"the configuration file {path} ({origin}) cannot be read: {cause}; correct the path"
        ) from error
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is not None:
            yield from _walk(loader, node, "", path)
    except yaml.YAMLError as error:
        mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
        where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        problem = error.problem if isinstance(error, yaml.MarkedYAMLError) else str(error)
        raise ConfigError(f"{where}: not valid YAML: {problem}; correct that line") from error
    finally:
        loader.dispose()


def _walk(loader: yaml.SafeLoader, node: yaml.Node, prefix: str, path: Path) -> Iterator[tuple[str, Any, str]]:
    where = f"{path}:{node.start_mark.line + 1}"
    if not isinstance(node, yaml.MappingNode):
        section = prefix.rstrip(".") or "the file"
        raise ConfigError(f"{where}: {section} must hold keys with values (key: value); see `twinpool config show`")
    seen: set[str] = set()
    for key_node, value_node in node.value:
        name = str(loader.construct_object(key_node))
        key, where = f"{prefix}{name}", f"{path}:{key_node.start_mark.line + 1}"
        if key in seen:
            raise ConfigError(f"{where}: {key} is given twice; keep one of them")
        seen.add(key)
        if any(known.startswith(f"{key}.") for known in KEYS):
            is_empty = isinstance(value_node, yaml.ScalarNode) and loader.construct_object(value_node) is None
            if not is_empty:  # a section whose keys are all commented out
                yield from _walk(loader, value_node, f"{key}.", path)
        else:
            _check_key(key, where, str)
            yield key, loader.construct_object(value_node, deep=True), where


def _validate(values: Mapping[str, Any], sources: Mapping[str, str]) -> Config:
    nested: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        inner = nested
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    try:
        return Config.model_validate(nested)
    except ValidationError as error:
        first = error.errors()[0]
        location = ".".join(str(part) for part in first["loc"])
        key = next((known for known in KEYS if f"{location}.".startswith(f"{known}.")), location)
        expected = first["msg"].removeprefix("Value error, ").replace("Input should be ", "expected ", 1)
        if key not in sources:  # a rule over several keys of a section
            raise ConfigError(f"{key}: {expected}") from error
        shown = "***" if key in SECRETS else repr(values.get(key))
        raise ConfigError(f"{sources[key]}: {key} is {shown}; {expected}") from error
