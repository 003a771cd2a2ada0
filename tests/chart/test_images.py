"""The images: linted, and installed by the Dockerfile's own commands in folders instead of containers."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from chart import ROOT

DOCKERFILE = ROOT / "docker" / "Dockerfile"
IGNORE = ROOT / "docker" / "Dockerfile.dockerignore"
PROGRAMS = Path(sys.executable).parent


def stages() -> dict[str, list[str]]:
    """Commands (RUN) of each build stage."""
    text = re.sub(r"\\\n", " ", DOCKERFILE.read_text())
    found: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if match := re.match(r"FROM \S+ AS (\S+)", line):
            name = match[1]
            found[name] = []
        elif line.startswith("RUN "):
            found[name].append(line.removeprefix("RUN "))
    return found


def context(folder: Path) -> Path:
    """What a build sees of the repository: the allowed names of the ignore file."""
    for line in IGNORE.read_text().splitlines():
        if line.startswith("!"):
            source, target = ROOT / line[1:], folder / line[1:]
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
            else:
                shutil.copy(source, target)
    return folder


def install(folder: Path, *names: str) -> Path:
    """Runs the commands of stages in ``folder``; returns the environment that they make."""
    source = context(folder / "src")
    for name in names:
        for command in stages()[name]:
            local = command.replace("/opt/", f"{folder}/opt/").replace("/wheels", f"{folder}/wheels")
            # Where there is one package index, it serves the builds of torch that this machine is meant to use.
            local = local.replace('--extra-index-url "${TORCH_INDEX}"', "")
            environment = {**os.environ, "PATH": f"{PROGRAMS}:{os.environ['PATH']}"}
            done = subprocess.run(
                ["sh", "-ec", local], cwd=source, env=environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{local}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return folder / "opt" / "twinpool"


def installed(environment: Path) -> dict[str, str]:
    """Package to version."""
    code = (
        "from importlib.metadata import distributions\n"
        "for one in distributions(): print(one.metadata['Name'].lower().replace('_', '-'), one.version.split('+')[0])"
    )
    printed = subprocess.run(
        [environment / "bin/python", "-I", "-c", code], capture_output=True, text=True, check=True
    ).stdout
    return dict(line.split() for line in printed.splitlines())


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints" / "images.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_dockerfile_is_linted() -> None:
    done = subprocess.run([PROGRAMS / "hadolint", DOCKERFILE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_builds_see_all_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    allowed = {line[1:] for line in IGNORE.read_text().splitlines() if line.startswith("!")}
    assert set(project["tool"]["setuptools"]["package-dir"].values()) <= allowed


def test_images_run_as_the_user_of_the_chart() -> None:
    users = re.findall(r"^USER (\S+)", DOCKERFILE.read_text(), re.MULTILINE)
    assert set(users) == {"0", "10001:10001"}
    for stage in re.split(r"^FROM ", DOCKERFILE.read_text(), flags=re.MULTILINE):
        if "USER 0" in stage:
            assert stage.rindex("USER 10001") > stage.rindex("USER 0")


@pytest.mark.slow
def test_the_router_image_has_pinned_packages_and_no_torch(tmp_path: Path) -> None:
    environment = install(tmp_path, "wheel", "install-router")
    found = installed(environment)
    assert found.pop("twinpool")
    assert found.items() <= pins().items()
    assert not {"torch", "numpy", "nixl", "ray", "pip"} & found.keys()
    command = [environment / "bin" / "twinpool", "serve", "router", "--model", str(tmp_path / "none")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "does not exist" in done.stderr


@pytest.mark.slow
def test_the_worker_image_has_pinned_packages(tmp_path: Path) -> None:
    environment = install(tmp_path, "wheel", "install-worker-cpu")
    found = installed(environment)
    assert found.pop("twinpool")
    assert found.items() <= pins().items()
    assert {"torch", "nixl", "ray"} <= found.keys()
    code = "import ray, nixl, torch, twinpool.prefill_worker.main, twinpool.decode_worker.main"
    subprocess.run([environment / "bin/python", "-I", "-c", code], check=True)
