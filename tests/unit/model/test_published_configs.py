"""config.json as published by the makers of each family, read as transformers reads it, or refused by name."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from twinpool.engine.errors import UnsupportedModel
from twinpool.engine.model_config import ModelConfig

LLAMA_3_2_1B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "eos_token_id": 128001,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
GEMMA_3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "vocab_size": 262144,
}
GEMMA_3_4B_TEXT = {
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "model_type": "gemma3_text",
    "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}
MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"],
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
PUBLISHED = {
    "llama-3.2-1b": LLAMA_3_2_1B,
    "gemma-3-1b": GEMMA_3_1B,
    "gemma-3-4b-text": GEMMA_3_4B_TEXT,
    "mixtral-8x7b": MIXTRAL_8X7B,
    "qwen3-30b-a3b": QWEN3_30B_A3B,
}


@pytest.fixture(params=PUBLISHED)
def both(request, tiny_llama, tmp_path):
    """A published configuration, as transformers and as the engine reads it."""
    from transformers import AutoConfig

    folder = tmp_path / "model"
    shutil.copytree(tiny_llama, folder)
    (folder / "generation_config.json").unlink()
    (folder / "config.json").write_text(json.dumps(PUBLISHED[request.param]))
    return AutoConfig.from_pretrained(folder), ModelConfig.from_hf(folder)


def test_sizes_and_windows(both):
    theirs, ours = both
    assert (ours.num_layers, ours.num_heads) == (theirs.num_hidden_layers, theirs.num_attention_heads)
    assert (ours.num_kv_heads, ours.vocab_size) == (theirs.num_key_value_heads, theirs.vocab_size)
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert (ours.rms_norm_eps, ours.tie_word_embeddings) == (theirs.rms_norm_eps, theirs.tie_word_embeddings)
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.attention_scale == getattr(theirs, "query_pre_attn_scalar", ours.head_dim) ** -0.5
    types = getattr(theirs, "layer_types", None) or ["full_attention"] * ours.num_layers
    assert ours.windows == tuple(theirs.sliding_window if kind == "sliding_attention" else None for kind in types)


def test_rotary_frequencies(both):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    theirs, ours = both
    ropes = {"full_attention": ours.rope, "sliding_attention": ours.local_rope}
    by_type = theirs.rope_parameters if "rope_theta" not in theirs.rope_parameters else {None: theirs.rope_parameters}
    for kind, parameters in by_type.items():
        rope = ropes[kind or "full_attention"]
        assert (rope.kind, rope.theta) == (parameters["rope_type"], parameters["rope_theta"])
        if rope.kind != "default":
            options = {"layer_type": kind} if kind else {}
            frequencies, factor = ROPE_INIT_FUNCTIONS[rope.kind](theirs, torch.device("cpu"), **options)
            found = rope.frequencies(ours.head_dim)
            assert torch.equal(found[0], frequencies)
            assert found[1] == factor


def test_experts(both):
    theirs, ours = both
    if ours.experts is None:
        assert not hasattr(theirs, "num_experts_per_tok")
        return
    assert ours.experts.num_experts == theirs.num_local_experts
    assert ours.experts.num_chosen == theirs.num_experts_per_tok
    assert ours.experts.layers == set(range(ours.num_layers))
    assert ours.experts.normalise == getattr(theirs, "norm_topk_prob", True)
    assert ours.experts.intermediate_size == getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)


@pytest.mark.parametrize(
    ("base", "changes", "match"),
    [
        (GEMMA_3_1B, {"hidden_activation": "gelu"}, "hidden_activation = 'gelu' is a feature"),
        (GEMMA_3_1B, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (GEMMA_3_1B, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA_3_1B, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar = 0 should be positive"),
        (GEMMA_3_1B, {"sliding_window": None}, "layer_types.*no sliding_window"),
        (GEMMA_3_1B, {"rope_parameters": {"rope_type": "linear"}}, "should be given by layer type"),
        (GEMMA_3_1B, {"architectures": ["Gemma3ForConditionalGeneration"]}, "Gemma3ForConditionalGeneration"),
        (MIXTRAL_8X7B, {"num_experts_per_tok": 9}, "num_experts_per_tok = 9 is more than the 8 experts"),
        (MIXTRAL_8X7B, {"hidden_act": "gelu"}, "hidden_act"),
        (QWEN3_30B_A3B, {"moe_intermediate_size": 0}, "moe_intermediate_size = 0 should be a positive integer"),
        (QWEN3_30B_A3B, {"quantization_config": {"quant_method": "fp8"}}, r"quantised \(fp8\)"),
        (QWEN3_30B_A3B, {"architectures": ["Qwen2MoeForCausalLM"]}, "Qwen2MoeForCausalLM"),
    ],
)
def test_what_cannot_be_computed_right_is_refused_without_weights(base, changes, match, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(base | changes))
    with pytest.raises(UnsupportedModel, match=match):
        ModelConfig.from_hf(tmp_path)


def test_several_modalities_are_refused_with_a_remedy(tmp_path):
    multimodal = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": GEMMA_3_4B_TEXT,
        "vision_config": {"model_type": "siglip_vision_model"},
    }
    (tmp_path / "config.json").write_text(json.dumps(multimodal))
    with pytest.raises(UnsupportedModel, match=r"Gemma3ForConditionalGeneration.*more than text.*language model alone"):
        ModelConfig.from_hf(tmp_path)
