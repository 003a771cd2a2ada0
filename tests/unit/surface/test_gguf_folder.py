"""The arithmetic of the conversion; the whole is compared with transformers in test_demo_model."""

from __future__ import annotations

import numpy as np
import torch

from twinpool.gguf_folder import to_bfloat16, unpermute


def test_unpermute_undoes_llama_cpp_permutation() -> None:
    heads, head_dim, width = 3, 8, 5
    rows = np.arange(heads * head_dim * width, dtype=np.float32).reshape(heads * head_dim, width)
    # As convert_hf_to_gguf.py permutes.
    permuted = rows.reshape(heads, 2, head_dim // 2, width).swapaxes(1, 2).reshape(rows.shape)
    assert not np.array_equal(permuted, rows)
    assert np.array_equal(unpermute(permuted, heads), rows)


def test_bfloat16_rounds_like_torch() -> None:
    values = np.random.default_rng(0).normal(size=4096).astype(np.float32)
    ties = np.array([1.00390625, 1.01171875, -1.00390625, 0.0, -0.0, 1e-40, 3.0e38], dtype=np.float32)
    values = np.concatenate([values, ties])
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    assert np.array_equal(to_bfloat16(values), expected)
