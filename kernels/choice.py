"""Which implementation of ``Kernels`` a rank gets."""

from __future__ import annotations

import functools
import importlib.util
import logging
import time
from pathlib import Path
from typing import Literal

import torch

from twinpool.cache import cache_folder
from twinpool.kernels.interface import CpuSampling, Kernels, RowSampling
from twinpool.kernels.native import DTYPES, NativeKernels
from twinpool.kernels.native_library import Level, NativeLibrary, NativeUnavailable, load_library
from twinpool.kernels.native_sampling import NativeSampling
from twinpool.kernels.reference import ReferenceKernels
from twinpool.kernels.tiles import DEFAULT_TILES, AttentionWorkload, Tiles, Tuning

KernelName = Literal["auto", "reference", "native"]

log = logging.getLogger(__name__)


def kernels_for(
    name: KernelName, device: torch.device, dtype: torch.dtype, threads: int, workload: AttentionWorkload | None = None
) -> Kernels:
    """Kernels for a model in ``dtype`` on ``device``; the log says which ones, and why not faster ones.

    "auto" is Triton on CUDA devices; on CPU it is "native" (C++, compiled on first use, with ``threads`` threads) where
    that works, else torch. Triton is imported only where it is used. With ``workload`` its attention takes tiles that
    were timed on it, now or at an earlier start; None leaves the defaults.

    Raises:
        ImportError: a CUDA device without Triton; plain torch operators would be several times slower, unnoticed.
        NativeUnavailable: ``name`` is native and they cannot be compiled, or are not made for ``device`` or ``dtype``.
    """
    if name == "auto" and device.type == "cuda":
        return _for_cuda(device, workload)
    if name == "reference" or (name == "auto" and (device.type != "cpu" or dtype not in DTYPES)):
        log.info("kernels: reference (torch)")
        return ReferenceKernels(prepack=True)
    if device.type != "cpu" or dtype not in DTYPES:
        raise NativeUnavailable(f"native kernels are for float32 and bfloat16 on CPU, not for {dtype} on {device}")
    library = native_library(cache_folder())
    if isinstance(library, NativeUnavailable):
        if name == "native":
            raise library
        log.warning("kernels: reference (torch), several times slower than native ones: %s", library)
        return ReferenceKernels(prepack=True)
    log.info("kernels: native, %s, %s", library.level.name.lower(), library.compiler)
    return NativeKernels(library, threads=threads)


@functools.cache
def native_library(cache: Path) -> NativeLibrary | NativeUnavailable:
    """This machine's library, or why there is none; kernels and sampling ask for it, and it is looked for once."""
    try:
        return load_library(cache, Level.of_machine())
    except NativeUnavailable as error:
        return error


def _for_cuda(device: torch.device, workload: AttentionWorkload | None) -> Kernels:
    if importlib.util.find_spec("triton") is None:
        raise ImportError(f"{device} needs Triton, which is not installed: pip install 'twinpool[gpu]'")
    from twinpool.kernels.triton_kernels import TritonKernels

    return TritonKernels.on(device, DEFAULT_TILES if workload is None else _tiles_for(device, workload))


def _tiles_for(device: torch.device, workload: AttentionWorkload) -> Tiles:
    from twinpool.kernels.tile_cache import Environment, tuned_tiles
    from twinpool.kernels.tile_tuning import tune_on

    def tune() -> Tuning:
        return tune_on(device, workload, time.monotonic)

    try:
        return tuned_tiles(workload, Environment.of(device), cache_folder(), tune)
    except RuntimeError as error:  # torch and Triton have no narrower type; a worker can do without
        log.warning("attention keeps its default tiles, timing others failed: %s", error)
        return DEFAULT_TILES


def device_sampling_for(device: torch.device) -> RowSampling | None:
    """Triton on CUDA devices; None elsewhere."""
    if device.type != "cuda":
        return None
    from twinpool.kernels.row_sampling import RowSampler

    return RowSampler()


def cpu_sampling_for(name: KernelName, device: torch.device) -> CpuSampling | None:
    """C++ on a CPU where it can be compiled and ``name`` is not "reference"; None elsewhere (torch and numpy, slower).

    ``kernels_for`` has told in the log why C++ is missing.
    """
    if device.type != "cpu" or name == "reference":
        return None
    library = native_library(cache_folder())
    if isinstance(library, NativeUnavailable):
        return None
    return NativeSampling(library, threads=torch.get_num_threads())
