"""API keys: who may call the public surface, and with which limits.

Keys come from a YAML file (name to entry), read again within a second of a change, and from the configuration
(``name:sha256:limit=value:...``). Only SHA-256 digests are kept anywhere: keys are long and random, so no slower hash
is needed. A file that cannot be used after a change leaves the old keys in force, with a warning.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from twinpool.config import AuthSection
from twinpool.errors import ConfigError, Unauthenticated
from twinpool.router.caller import ANYBODY, Caller

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0


class _Entry(BaseModel):
    """One key of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    weight: float = Field(1.0, gt=0, le=1000)
    max_in_flight: int | None = Field(None, gt=0)
    tokens_per_minute: int | None = Field(None, gt=0)
    best_priority: int = Field(0, ge=-(2**31), le=2**31 - 1)


_File = TypeAdapter(dict[str, _Entry])


class ApiKeys:
    """Names the caller of a request by its ``authorization``."""

    def __init__(self, section: AuthSection, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ConfigError: the file or an entry cannot be used."""
        self._path = None if section.keys_file is None else Path(section.keys_file)
        self._configured = _from_configuration(section.keys)
        self._clock = clock
        self._looked = clock()
        self._stamp = self._look()
        self._callers = self._read()

    @property
    def required(self) -> bool:
        """Whether a key is asked for: keys are configured, be the list empty by now."""
        return self._path is not None or bool(self._configured)

    def caller(self, authorization: str) -> Caller:
        """The caller.

        Raises:
            Unauthenticated: keys are configured, and this is none of them.
        """
        if not self.required:
            return ANYBODY
        self._refresh()
        scheme, _, key = authorization.partition(" ")
        given = hashlib.sha256(key.strip().encode(errors="surrogateescape")).digest()
        found: Caller | None = None
        for digest, caller in self._callers:  # all of them: the time says nothing about which one fits
            if hmac.compare_digest(digest, given):
                found = caller
        if found is None or scheme.lower() != "bearer":
            raise Unauthenticated("the API key is missing or unknown; send it as Authorization: Bearer KEY")
        return found

    def authenticate(self, authorization: str) -> None:
        """Raises Unauthenticated: see ``caller``."""
        self.caller(authorization)

    def _refresh(self) -> None:
        now = self._clock()
        if now - self._looked < _LOOK_EVERY_S:
            return
        self._looked = now
        stamp = self._look()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._callers = self._read()
        except ConfigError as error:
            log.warning("the changed API keys are not used: %s", error.message)
        else:
            log.info("API keys changed: %d in force", len(self._callers))

    def _look(self) -> tuple[int, int, int]:
        try:
            status = os.stat(self._path) if self._path is not None else None
        except OSError:
            status = None
        return (0, 0, 0) if status is None else (status.st_mtime_ns, status.st_size, status.st_ino)

    def _read(self) -> list[tuple[bytes, Caller]]:
        entries = dict(self._configured)
        if self._path is not None:
            entries |= _from_file(self._path)
        digests = [entry.sha256 for entry in entries.values()]
        if len(set(digests)) < len(digests):
            raise ConfigError("two API keys have the same sha256; give each name a key of its own")
        return [(bytes.fromhex(entry.sha256), _caller(name, entry)) for name, entry in entries.items()]


def _caller(name: str, entry: _Entry) -> Caller:
    return Caller(name, entry.weight, entry.max_in_flight, entry.tokens_per_minute, entry.best_priority)


def _from_file(path: Path) -> Mapping[str, _Entry]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"auth.keys_file {path} cannot be read ({error}); give a YAML file of names") from error
    return _parse({} if content is None else content, f"auth.keys_file {path}")


def _from_configuration(items: Sequence[str]) -> Mapping[str, _Entry]:
    content: dict[str, Any] = {}
    for item in items:
        name, _, rest = item.partition(":")
        digest, *limits = rest.split(":")
        content[name] = {"sha256": digest} | dict(limit.partition("=")[::2] for limit in limits)
    return _parse(content, "auth.keys")


def _parse(content: Any, where: str) -> Mapping[str, _Entry]:
    try:
        entries = _File.validate_python(content)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{where}: {place}: {first['msg']}; each name has a sha256 and limits") from error
    for name in entries:
        if not name or len(name) > 64 or not (name.isascii() and name.isprintable()):
            raise ConfigError(f"{where}: {name!r} is no name; take up to 64 printable ASCII characters")
    return entries
