from __future__ import annotations

import logging
import platform
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from twinpool.cache import cache_folder
from twinpool.kernels.choice import cpu_sampling_for, kernels_for, native_library
from twinpool.kernels.native import NativeKernels
from twinpool.kernels.native_library import FLAGS, SOURCE, Level, NativeUnavailable, load_library
from twinpool.kernels.native_sampling import NativeSampling
from twinpool.kernels.reference import ReferenceKernels

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_loaded() -> Iterator[None]:
    """Each test is a process that has not asked for the library yet, and leaves one."""
    native_library.cache_clear()
    yield
    native_library.cache_clear()


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that takes a moment, notes its calls, and hands out a library that was compiled before."""
    level = Level.of_machine()
    load_library(cache_folder(), level)
    made = sorted(cache_folder().glob(f"kernels-{level.name.lower()}-*.so"), key=lambda file: file.stat().st_mtime)[-1]
    script = tmp_path / "compiler"
    script.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && { echo fake 1.0; exit 0; }\n'
        f'echo called >> {tmp_path}/calls\nsleep 0.2\nfor last in "$@"; do :; done\ncp {made} "$last"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return script


def test_compiles_once_however_many_start(compiler: Path, tmp_path: Path) -> None:
    loaded = []
    threads = [
        threading.Thread(target=lambda: loaded.append(load_library(tmp_path / "cache", Level.of_machine())))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [library.compiler for library in loaded] == ["fake 1.0"] * 4
    assert (tmp_path / "calls").read_text().split() == ["called"]
    assert sorted(file.suffix for file in (tmp_path / "cache").iterdir()) == [".lock", ".so"]


def test_another_compiler_compiles_anew(compiler: Path, tmp_path: Path) -> None:
    load_library(tmp_path / "cache", Level.of_machine())
    compiler.write_text(compiler.read_text().replace("fake 1.0", "fake 2.0"))
    load_library(tmp_path / "cache", Level.of_machine())
    assert len((tmp_path / "calls").read_text().split()) == 2


def test_without_a_compiler_torch_serves_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert isinstance(kernels_for("auto", CPU, torch.float32, 1), ReferenceKernels)
    assert "no C++ compiler; install g++" in caplog.text
    assert cpu_sampling_for("auto", CPU) is None
    with pytest.raises(NativeUnavailable, match="install g"):
        kernels_for("native", CPU, torch.float32, 1)


def test_a_cxx_that_cannot_be_run_is_told(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: str(compiler) if name == "c++" else real(name))
    monkeypatch.setenv("CXX", "/nonexistent")
    assert load_library(tmp_path / "cache", Level.of_machine()).compiler == "fake 1.0"
    assert f"CXX=/nonexistent is no program that can be run; {compiler} compiles the kernels" in caplog.text


def test_a_compiler_that_fails_is_quoted(compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "x.h:1: error: no such thing" >&2\nexit 1\n')
    monkeypatch.setenv("TWINPOOL_CACHE", str(tmp_path / "cache"))
    with pytest.raises(NativeUnavailable, match="error: no such thing"):
        kernels_for("native", CPU, torch.float32, 1)
    assert not list((tmp_path / "cache").glob("*.so"))


def test_a_compiler_that_fails_is_run_once(compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit 0\necho called >> {tmp_path}/calls\nexit 1\n')
    monkeypatch.setenv("TWINPOOL_CACHE", str(tmp_path / "cache"))
    assert isinstance(kernels_for("auto", CPU, torch.float32, 1), ReferenceKernels)
    assert cpu_sampling_for("auto", CPU) is None
    assert (tmp_path / "calls").read_text().split() == ["called"]


def test_a_cache_that_cannot_be_written(compiler: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NativeUnavailable, match="TWINPOOL_CACHE"):
        load_library(tmp_path / "file", Level.of_machine())


def test_choice(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert isinstance(kernels_for("auto", CPU, torch.bfloat16, 1), NativeKernels)
    assert "kernels: native" in caplog.text
    assert isinstance(kernels_for("reference", CPU, torch.bfloat16, 1), ReferenceKernels)
    assert isinstance(kernels_for("auto", CPU, torch.float16, 1), ReferenceKernels)
    assert isinstance(cpu_sampling_for("auto", CPU), NativeSampling)
    assert cpu_sampling_for("reference", CPU) is None
    with pytest.raises(NativeUnavailable, match="float16"):
        kernels_for("native", CPU, torch.float16, 1)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the levels above portable are x86's")
@pytest.mark.parametrize("level", Level, ids=lambda level: level.name.lower())
def test_every_level_is_valid_code(level: Level) -> None:
    """Also those that this processor cannot run."""
    command = ["c++", *FLAGS, *level.value, "-Wall", "-Wextra", "-Werror", "-fsyntax-only", str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
