"""Every family against transformers, with weights that transformers itself wrote."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from tiny_models import FAMILIES
from twinpool.engine.errors import UnsupportedModel

SLIDING = {"use_sliding_window": True, "sliding_window": 11}
LINEAR_ROPE = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
VARIANTS = {
    **{family: (family, {}) for family in FAMILIES},
    "mistral-full": ("mistral", {"sliding_window": None}),
    "qwen2-full": ("qwen2", {"use_sliding_window": False, "tie_word_embeddings": False}),
    "qwen3-sliding-biased": ("qwen3", {"attention_bias": True, "max_window_layers": 1, **SLIDING}),
    "gemma3-untied-capped": (
        "gemma3",
        {
            "tie_word_embeddings": False,
            "final_logit_softcapping": 2.0,
            "attention_bias": True,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "rope_parameters": {"full_attention": LINEAR_ROPE, "sliding_attention": {"rope_type": "default"}},
        },
    ),
    "gemma3-all-sliding": ("gemma3", {"layer_types": ["sliding_attention"] * 3, "num_key_value_heads": 1}),
    "mixtral-sliding": ("mixtral", {"sliding_window": 9, "num_experts_per_tok": 1, "head_dim": 32}),
    "mixtral-fused-tied": ("mixtral", {"expert_layout": "fused", "tie_word_embeddings": True}),
    "qwen3-moe-fused": ("qwen3-moe", {"expert_layout": "fused", "norm_topk_prob": False, "attention_bias": True}),
    "qwen3-moe-sliding": ("qwen3-moe", {"decoder_sparse_step": 2, "mlp_only_layers": [], **SLIDING}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_family_equals_transformers(
    name, tmp_path, make_tiny_model, make_harness, reference, reference_greedy, random_prompt
):
    family, overrides = VARIANTS[name]
    folder = make_tiny_model(family, tmp_path, **overrides)
    model, harness = reference(folder), make_harness(folder)
    short, long, chunked = (harness.request(random_prompt(n), 8) for n in (10, 37, 53))
    harness.generate(long)
    while len(chunked.output_ids) < 8:
        running = [r for r in (short, chunked) if len(r.output_ids) < 8]
        harness.step([(r, min(13, r.num_tokens - r.num_computed_tokens)) for r in running])
    for request in (short, long, chunked):
        assert request.output_ids == reference_greedy(model, request.prompt_ids, 8)

    def expected(request):
        with torch.inference_mode():
            return model(torch.tensor([request.prompt_ids + request.output_ids[:-1]])).logits[0, -8:]

    alone = torch.cat(harness.sampler.calls[:8])
    torch.testing.assert_close(alone, expected(long), rtol=1e-4, atol=1e-4)
    mixed = torch.stack([logits[-1] for logits in harness.sampler.calls[-8:]])
    torch.testing.assert_close(mixed, expected(chunked), rtol=1e-4, atol=1e-4)
    assert alone.std() > 0.2


@pytest.mark.parametrize("family", FAMILIES)
def test_sharded_files_load_the_same(family, tmp_path, make_tiny_model, make_harness, random_prompt):
    outputs = []
    for sharded in (False, True):
        folder = make_tiny_model(family, tmp_path / str(sharded), sharded=sharded)
        assert (folder / "model.safetensors.index.json").exists() == sharded
        harness = make_harness(folder)
        harness.generate(harness.request(random_prompt(20), 3))
        outputs.append(torch.cat(harness.sampler.calls))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
def test_both_layouts_of_experts_load_the_same(family, tmp_path, make_tiny_model, make_harness, random_prompt):
    outputs = []
    names = {"mixtral": "block_sparse_moe.experts.3.w2.weight", "qwen3-moe": "mlp.experts.5.down_proj.weight"}
    for layout, name in (("single", names[family]), ("fused", "mlp.experts.down_proj")):
        folder = make_tiny_model(family, tmp_path / layout, expert_layout=layout)
        assert f"model.layers.0.{name}" in load_file(folder / "model.safetensors")
        harness = make_harness(folder)
        harness.generate(harness.request(random_prompt(20), 3))
        outputs.append(torch.cat(harness.sampler.calls))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("family", FAMILIES)
def test_other_requests_change_no_token(family, tmp_path, make_tiny_model, make_harness, random_prompt):
    """A request decodes to the same tokens alone, in chunks, and among others that come and go."""
    harness = make_harness(make_tiny_model(family, tmp_path))
    prompt = random_prompt(40)
    alone = list(harness.generate(harness.request(prompt, 10)))
    assert harness.generate(harness.request(prompt, 10), chunk=7) == alone
    request, others = harness.request(prompt, 10), [harness.request(random_prompt(n), 4) for n in (3, 30, 17)]
    while len(request.output_ids) < 10:
        running = [r for r in (*others, request) if len(r.output_ids) < r.stop.max_tokens]
        harness.step([(r, min(9, r.num_tokens - r.num_computed_tokens)) for r in running])
    assert request.output_ids == alone


@pytest.mark.parametrize("family", ["gemma3", "mistral"])
def test_a_prefix_in_cache_serves_sliding_layers(family, tmp_path, make_tiny_model, make_harness, random_prompt):
    """Blocks older than the window stay: a second request that continues from them computes the same."""
    harness = make_harness(make_tiny_model(family, tmp_path))
    first = harness.request(random_prompt(48), 1)
    harness.generate(first)
    continued = random_prompt(48) + random_prompt(5)
    fresh = list(harness.generate(harness.request(continued, 8)))
    hit = harness.request(continued, 8)
    hit.block_ids[:3], hit.num_computed_tokens = first.block_ids[:3], 48
    assert harness.generate(hit) == fresh


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_stays_near_float32(family, tmp_path, make_tiny_model, make_harness, random_prompt):
    """Same weights, so only the rounding of activations differs. All experts work: rounding might choose others."""
    every = {"mixtral": {"num_experts_per_tok": 4}, "qwen3-moe": {"num_experts_per_tok": 6}}
    folder = make_tiny_model(family, tmp_path, dtype="bfloat16", **every.get(family, {}))
    exact, rounded = make_harness(folder), make_harness(folder, dtype="bfloat16")
    for harness in (exact, rounded):
        harness.generate(harness.request(random_prompt(40), 1), chunk=25)
    left, right = exact.sampler.calls[0][0], rounded.sampler.calls[0][0]
    assert torch.nn.functional.cosine_similarity(left, right, 0) > 0.99


def test_missing_experts_are_named(tmp_path, make_tiny_model, make_harness):
    folder = make_tiny_model("mixtral", tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_local_experts": 5}))
    with pytest.raises(UnsupportedModel, match=r"missing: model\.layers\.0\.block_sparse_moe\.experts\.4\.w1\.weight"):
        make_harness(folder)
