"""Kernels, CUDA graphs and both pools on a GPU."""

from __future__ import annotations

import pytest


def test_kernels_equal_the_reference(device):
    from gpu_kernels import contract

    failed = [row for row in contract(device) if not row.ok]
    assert not failed


def test_replayed_steps_give_the_tokens_of_the_cpu(device, tiny_llama):
    from gpu_engine import exactness

    failed = [row for row in exactness(device, tiny_llama) if not row.ok]
    assert not failed


@pytest.mark.parametrize("connector", ["nixl", "nccl"])
def test_both_pools_give_the_tokens_of_one_engine(device, tiny_llama, connector):
    from gpu_engine import pools

    if connector == "nixl":
        pytest.importorskip("nixl")
    failed = [row for row in pools(device, tiny_llama, connector) if not row.ok]
    assert not failed
