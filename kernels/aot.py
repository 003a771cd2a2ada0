"""Compiles Triton kernels for GPUs that are not there, and reads what they take: registers, spills, shared memory.

1. ``Recorder`` is a ``Launch`` that starts nothing: the operators run on tensors that have shapes only (device "meta"),
   and what they would launch is kept, specialised as Triton's own launcher does: 1 is a constant, multiples of 16 are
   known as such, pointers are aligned to 16 bytes.
2. ``variants`` records the operators of the model families, so that what is checked is what is launched.
3. ``compile_for`` makes a cubin with the assembler that Triton ships, and parses its report.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import re
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from twinpool.kernels.model_shapes import MODELS, batch_of, run_layer, run_sampling
from twinpool.kernels.paged_attention import decode_rows
from twinpool.kernels.row_sampling import RowSampler
from twinpool.kernels.tiles import Tiles, decode_candidates, prefill_candidates
from twinpool.kernels.triton_kernels import TritonKernels

ARCHITECTURES = (80, 90, 100)
"""A100; H100, H200; B200."""
SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Bytes of shared memory that one block may take."""
_OPTIONS = ("num_warps", "num_stages")
_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float64: "fp64",
}


@dataclass(frozen=True, slots=True)
class Resources:
    """Of one compiled kernel: registers per thread, bytes spilled per thread (stores and loads), shared bytes."""

    registers: int
    spills: int
    shared: int


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel with the types and constants of one launch."""

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    divisible: tuple[str, ...]
    options: tuple[tuple[str, int], ...]

    def _source(self) -> ASTSource:
        names = self.kernel.arg_names
        attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in self.divisible}
        return ASTSource(self.kernel, dict(self.signature), dict(self.constants), attributes)

    @property
    def name(self) -> str:
        """Unique and readable: the kernel, types of its tensors, constants, options, sizes not divisible by 16."""
        types = sorted({kind[1:] for _, kind in self.signature if kind.startswith("*")} - {"i32", "i64"})
        pairs = (*self.constants, *self.options)
        free = {parameter.name for parameter in self.kernel.params if parameter.do_not_specialize} | {*self.divisible}
        odd = [f"{name}=odd" for name, kind in self.signature if kind in ("i32", "i64") and name not in free]
        return " ".join((self.kernel.__name__, "/".join(types), *(f"{key}={value}" for key, value in pairs), *odd))

    def compile_for(self, architecture: int) -> Resources:
        """Compiles for ``sm_<architecture>``.

        Raises:
            RuntimeError: the assembler's report has no registers.
        """
        report = io.StringIO()
        with triton.knobs.compilation.scope(), triton.knobs.nvidia.scope(), contextlib.redirect_stdout(report):
            triton.knobs.compilation.always_compile = True
            triton.knobs.nvidia.dump_ptxas_log = True
            compiled = triton.compile(self._source(), GPUTarget("cuda", architecture, 32), dict(self.options))
        registers = re.search(r"Used (\d+) registers", report.getvalue())
        spills = re.findall(r"(\d+) bytes spill", report.getvalue())
        if registers is None:
            raise RuntimeError(f"{self.name}: no registers in the assembler's report: {report.getvalue()!r}")
        return Resources(int(registers[1]), sum(map(int, spills)), compiled.metadata.shared)


@dataclass(slots=True)
class Recorder:
    """Implements ``Launch``: keeps each variant once."""

    variants: dict[Variant, None] = field(default_factory=dict)

    def __call__(self, kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
        """See ``Launch``."""
        if 0 in grid:
            return
        signature, constants, divisible = [], [], []
        for parameter in kernel.params:
            name, value = parameter.name, arguments[parameter.name]
            if parameter.is_constexpr:
                kind = "constexpr"
            elif isinstance(value, torch.Tensor):
                kind = f"*{_TYPES[value.dtype]}"
                if not parameter.do_not_specialize_on_alignment:
                    divisible.append(name)
            elif isinstance(value, float):
                kind = "fp32"
            elif value == 1 and not parameter.do_not_specialize:
                kind = "constexpr"
            else:
                kind = "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
                if value % 16 == 0 and not parameter.do_not_specialize:
                    divisible.append(name)
            signature.append((name, kind))
            if kind == "constexpr":
                constants.append((name, value))
        options = tuple((name, arguments[name]) for name in _OPTIONS if name in arguments)
        variant = Variant(kernel, tuple(signature), tuple(constants), tuple(divisible), options)
        self.variants[variant] = None


CANDIDATES = 4
"""Most candidates that a kernel has."""
UNSPLIT = ("Llama-3.2-1B", "Llama-3.1-8B", "Gemma-3-4B")
"""Shapes that are compiled for batches large enough not to split keys, one per head size."""
HALF_PRECISION = ("SmolLM2-135M", "Llama-3.1-8B", "Gemma-2-9B")
"""Shapes that are compiled in float16 too, one per head size, window and soft cap."""


def variants() -> list[Variant]:
    """What the families launch: decode alone, beside prompts and drafts, in large batches; prefill; sampling.

    Attention in all tiles among which ``tile_tuning`` chooses.
    """
    recorder = Recorder()
    meta = torch.device("meta")
    for shape, number in itertools.product(MODELS, range(CANDIDATES)):
        group, dim = shape.heads // shape.kv_heads, shape.head_dim
        decodes, prefills = decode_candidates(decode_rows(1, group), dim, 2), prefill_candidates(group, dim, 2)
        tiles = Tiles(decodes[min(number, len(decodes) - 1)], prefills[min(number, len(prefills) - 1)])
        kernels = TritonKernels(processors=132, launch=recorder, tiles=tiles)
        steps = [([1] * 2, 8000), ([1, 1100], 8000), ([1, 5, 1100], 8000)]
        if shape.name in UNSPLIT:
            steps.append(([1] * 640, 300))
        for lengths, context in steps:
            run_layer(kernels, shape, torch.bfloat16, batch_of(lengths, context, meta), 1000)
        if shape.name in HALF_PRECISION:
            for lengths in ([1] * 2, [1100] * 2):
                run_layer(kernels, shape, torch.float16, batch_of(lengths, 8000, meta), 1000)
        run_sampling(RowSampler(recorder), shape, meta)
    return sorted(recorder.variants, key=lambda variant: variant.name)
