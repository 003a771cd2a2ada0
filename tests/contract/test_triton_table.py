"""Triton kernels compiled for GPUs that are not here, compared with the table that ``scripts/aot_table`` writes."""

from __future__ import annotations

import functools
import importlib.util
import json
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

TABLE = json.loads((Path(__file__).parent / "aot_table.json").read_text())
ARCHITECTURES = ("80", "90", "100")
# A variant of each kernel that compiles fast, and attention at the most common shapes.
SAMPLE = {
    "combine_experts_kernel bf16": "80",
    "combine_kernel bf16/fp32 HEAD_DIM=128": "90",
    "decode_kernel bf16/fp32 GROUP=4 HEAD_DIM=128": "90",
    "decode_kernel fp16/fp32 GROUP=2 HEAD_DIM=256": "80",
    "gated_kernel bf16": "100",
    "grouped_matmul_kernel bf16": "90",
    "prefill_kernel bf16 GROUP=4 HEAD_DIM=64": "80",
    "rms_norm_kernel bf16/fp32": "100",
    "rotary_write_kernel bf16": "80",
}
SPILLS = ("GROUP=3", "GROUP=7")
"""Prompts of models whose group of query heads is no power of two spill up to 100 bytes a thread in their default tile.
Nothing else does, and no candidate for another tile."""


def allowed_spills(name: str) -> int:
    default = "ROWS=128 TILE=64" in name and "num_warps=8 num_stages=3" in name
    return 100 if name.startswith("prefill_kernel") and name.split()[2] in SPILLS and default else 0


@functools.cache
def compiled() -> dict[str, Any]:
    """Variants by name; importing Triton and recording them takes seconds."""
    from twinpool.kernels.aot import variants

    return {variant.name: variant for variant in variants()}


def compare(name: str, architecture: str) -> None:
    import triton

    resources = compiled()[name].compile_for(int(architecture))
    assert resources.spills <= allowed_spills(name), f"{name} spills on sm_{architecture}: {resources}"
    if triton.__version__ == TABLE["triton"]:
        expected = tuple(TABLE["kernels"][name][architecture])
        assert astuple(resources) == expected, f"{name} on sm_{architecture}: run scripts/aot_table"


def test_the_table_holds_what_is_launched_and_little_spills():
    from twinpool.kernels.aot import SHARED_LIMIT

    assert list(TABLE["kernels"]) == list(compiled()), "run scripts/aot_table"
    for name, entry in TABLE["kernels"].items():
        for architecture in ARCHITECTURES:
            _, spills, shared = entry[architecture]
            assert spills <= allowed_spills(name), f"{name} spills on sm_{architecture}"
            assert shared <= SHARED_LIMIT[int(architecture)], name


@pytest.mark.parametrize(("start", "architecture"), SAMPLE.items(), ids=SAMPLE)
def test_a_sample_compiles_as_the_table_says(start, architecture):
    compare(next(name for name in TABLE["kernels"] if name.startswith(start)), architecture)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", TABLE["kernels"])
def test_all_compile_as_the_table_says(name, architecture):
    compare(name, architecture)
