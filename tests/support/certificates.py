"""Certificates for tests, made with the openssl command: an authority, and what it signs."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest


def needs_openssl() -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")


@dataclass(frozen=True)
class Pair:
    cert: Path
    key: Path


class Authority:
    """Signs certificates; ``ca`` is its own."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.ca = folder / f"{name}.pem"
        self._key = folder / f"{name}.key"
        _openssl("req", "-x509", *_NEW, "-keyout", self._key, "-out", self.ca, "-subj", f"/CN={name}", "-days", "2")

    def sign(self, name: str, san: str = "DNS:localhost,IP:127.0.0.1") -> Pair:
        pair = Pair(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        request = self._folder / f"{name}.csr"
        _openssl("req", *_NEW, "-keyout", pair.key, "-out", request, "-subj", f"/CN={name}")
        extensions = self._folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName={san}\n")
        signer = ["-CA", self.ca, "-CAkey", self._key, "-CAcreateserial", "-extfile", extensions, "-days", "2"]
        _openssl("x509", "-req", "-in", request, "-out", pair.cert, *signer)
        return pair

    def settings(self, pair: Pair) -> dict[str, object]:
        """The ``tls`` section of a process with this certificate."""
        return {"cert": str(pair.cert), "key": str(pair.key), "ca": str(self.ca)}


_NEW = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
