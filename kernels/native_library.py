"""Compiles the C++ kernels (``*.h``, ``native.cpp``) on first use and loads them.

1. ``load_library`` looks in the cache for a library made of the same sources by the same compiler with the same flags.
2. If there is none it compiles one, some seconds, under a lock that other processes wait for, and publishes it by a
   rename. The sources need a C++17 compiler and nothing else.
3. The library stays loaded until the process ends.

One source serves all processors: vectors are as wide as the flags of a ``Level`` allow.
"""

from __future__ import annotations

import ctypes
import enum
import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from ctypes import c_float, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("native.cpp")
FLAGS = (
    *("-std=c++17", "-O2", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-Wno-psabi"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
)
COMPILE_TIMEOUT_S = 300.0

QUICK = 1 << 16
"""Work below this many values, some 20 µs, keeps Python's interpreter lock: giving it up beside a busy thread can take
longer than the work."""


class NativeUnavailable(RuntimeError):
    """The kernels cannot be compiled or loaded here; says why and what to do."""


class Level(enum.Enum):
    """Instruction sets; the value is the compiler's flags. ``PORTABLE`` runs on any processor."""

    PORTABLE = ()
    AVX2 = ("-mavx2", "-mfma")
    AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512")
    AVX512_BF16 = (*AVX512, "-mavx512bf16")

    @classmethod
    def of_machine(cls) -> Level:
        """The best that this processor has (ATEN_CPU_CAPABILITY lowers it, as for torch)."""
        level = {"AVX2": cls.AVX2, "AVX512": cls.AVX512}.get(torch.backends.cpu.get_cpu_capability(), cls.PORTABLE)
        return cls.AVX512_BF16 if level is cls.AVX512 and torch.cpu._is_avx512_bf16_supported() else level


class Functions:
    """The functions of ``native.cpp``, all without result."""

    def __init__(self, library: ctypes.CDLL) -> None:
        sizes = [c_int64] * 4
        self.linear = _declare(
            library["tp_linear"], c_int, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_int
        )
        self.rms_norm = _declare(
            library["tp_rms_norm"], c_int, c_int, c_void_p, *sizes, c_void_p, c_void_p, c_float, c_void_p, c_int
        )
        self.rotary_write = _declare(
            library["tp_rotary_write"],
            *(c_int, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p),
            *(*sizes, c_void_p, c_int64, c_int64, c_void_p, c_int),
        )
        self.gated = _declare(library["tp_gated"], c_int, c_int, c_void_p, c_int64, c_int64, c_void_p, c_int)
        self.attention = _declare(
            library["tp_attention"],
            *(c_int, c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_float, c_int64, c_float, c_int),
        )
        self.sample = _declare(
            library["tp_sample"], c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_int
        )
        self.logprobs = _declare(
            library["tp_logprobs"],
            *(c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int64, c_int64),
            *(c_void_p, c_void_p, c_void_p, c_void_p, c_int),
        )


def _declare(function: Any, *arguments: type) -> Any:
    function.argtypes, function.restype = arguments, None
    return function


class NativeLibrary:
    """A loaded library."""

    def __init__(self, file: Path, level: Level, compiler: str) -> None:
        """Raises OSError if ``file`` is no library for this machine."""
        self.level = level
        self.compiler = compiler
        held = ctypes.PyDLL(str(file))
        self.width: int = held["tp_width"]()
        self.paired = bool(held["tp_paired"]())
        self._quick, self._long = Functions(held), Functions(ctypes.CDLL(str(file)))

    def functions(self, work: int) -> Functions:
        """Functions that keep the interpreter lock, or give it up while they run; ``work`` in values."""
        return self._quick if work < QUICK else self._long


def load_library(cache: Path, level: Level) -> NativeLibrary:
    """The library for ``level``, compiled into the folder ``cache`` if it is not there.

    Raises:
        NativeUnavailable: no compiler, it failed, or the folder cannot be written.
    """
    names = [os.environ.get("CXX"), "c++", "g++", "clang++"]
    compiler = next(filter(None, (shutil.which(name) for name in names if name)), None)
    if compiler is None:
        raise NativeUnavailable("there is no C++ compiler; install g++ or clang++")
    if names[0] and not shutil.which(names[0]):
        log.warning("CXX=%s is no program that can be run; %s compiles the kernels", names[0], compiler)
    command = [compiler, *FLAGS, *level.value]
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
        key = hashlib.sha256("\0".join([*command, version]).encode())
        for file in sorted([SOURCE, *SOURCE.parent.glob("*.h")]):
            key.update(file.read_bytes())
        library = cache / f"kernels-{level.name.lower()}-{key.hexdigest()[:16]}.so"
        if not library.exists():
            _compile(command, library)
        return NativeLibrary(library, level, version.partition("\n")[0])
    except subprocess.CalledProcessError as error:
        reason = next((line for line in error.stderr.splitlines() if "error" in line), error.stderr.strip()[-500:])
        raise NativeUnavailable(f"{' '.join(error.cmd)} failed: {reason}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"{error}; set TWINPOOL_CACHE to a folder that can be written") from error


def _compile(command: list[str], library: Path) -> None:
    library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(library.parent / "kernels.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if library.exists():
            return
        log.info("compiling the CPU kernels, once for this machine: %s", library)
        with tempfile.TemporaryDirectory(prefix="compiling-", dir=library.parent) as folder:
            made = Path(folder) / library.name
            subprocess.run(
                [*command, str(SOURCE), "-o", str(made)],
                capture_output=True,
                text=True,
                timeout=COMPILE_TIMEOUT_S,
                check=True,
            )
            made.rename(library)
