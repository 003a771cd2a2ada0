from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from twinpool.engine.errors import UnsupportedModel
from twinpool.engine.model_config import ModelConfig

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"GPT2LMHeadModel.*supported are .*LlamaForCausalLM"),
        ({"architectures": None}, "architectures = None is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantised \(awq\)"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope type 'longrope' is not supported"),
        ({"rope_scaling": LLAMA3 | {"novelty": 1}}, "unknown rope parameters for type llama3: novelty"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope type linear lacks factor"),
        ({"vision_config": {}}, r"takes more than text \(vision_config\).*language model alone.*Gemma3ForCausalLM"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"num_hidden_layers": None}, "num_hidden_layers = None should be a positive integer"),
        ({"num_key_value_heads": 3}, "does not divide num_attention_heads"),
        ({"dtype": "float8_e4m3fn"}, "dtype = 'float8_e4m3fn'"),
    ],
)
def test_what_cannot_be_computed_right_is_refused_by_name(changes, match, tiny_llama, tmp_path):
    shutil.copytree(tiny_llama, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UnsupportedModel, match=match) as refusal:
        ModelConfig.from_hf(tmp_path / "model")
    assert str(path) in str(refusal.value)


def test_a_folder_without_config_is_refused(tmp_path):
    with pytest.raises(UnsupportedModel, match=r"no config\.json"):
        ModelConfig.from_hf(tmp_path)


def test_both_spellings_of_rope_are_one(tmp_path, make_tiny_llama):
    old = make_tiny_llama(tmp_path / "old", rope_theta=5e5, rope_scaling=LLAMA3)
    new = make_tiny_llama(tmp_path / "new", rope_theta=None, rope_parameters=LLAMA3 | {"rope_theta": 5e5})
    rope = ModelConfig.from_hf(old).rope
    assert rope == ModelConfig.from_hf(new).rope
    assert (rope.kind, rope.theta, rope.original_max_positions) == ("llama3", 5e5, 512)


def test_eos_ids_come_from_generation_config_first(tmp_path, make_tiny_llama):
    folder = make_tiny_llama(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert ModelConfig.from_hf(folder).eos_ids == {7, 8}
    (folder / "generation_config.json").write_text("{}")
    assert ModelConfig.from_hf(folder).eos_ids == {298}
    (folder / "generation_config.json").unlink()
    assert ModelConfig.from_hf(folder).eos_ids == {298}


def test_revision_is_content(tmp_path, make_tiny_llama):
    first = ModelConfig.from_hf(make_tiny_llama(tmp_path / "a")).revision
    assert ModelConfig.from_hf(make_tiny_llama(tmp_path / "elsewhere" / "b")).revision == first
    other = make_tiny_llama(tmp_path / "c")
    weights = load_file(other / "model.safetensors")
    weights["model.layers.1.self_attn.v_proj.weight"] += 0.01
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    assert ModelConfig.from_hf(other).revision != first
    assert ModelConfig.from_hf(make_tiny_llama(tmp_path / "d", rope_theta=5000.0)).revision != first


def test_sliding_windows_follow_the_family(tmp_path, make_tiny_llama):
    def windows(architecture, **changes):
        folder = make_tiny_llama(tmp_path, architectures=[architecture], num_hidden_layers=3, **changes)
        return ModelConfig.from_hf(folder).windows

    assert windows("LlamaForCausalLM", sliding_window=8) == (None, None, None)
    assert windows("MistralForCausalLM", sliding_window=8) == (8, 8, 8)
    assert windows("MistralForCausalLM", sliding_window=None) == (None, None, None)
    assert windows("MistralForCausalLM") == (4096, 4096, 4096)
    assert windows("Qwen2ForCausalLM", sliding_window=8, use_sliding_window=False) == (None, None, None)
    sliding = {"sliding_window": 8, "use_sliding_window": True}
    assert windows("Qwen2ForCausalLM", max_window_layers=1, **sliding) == (None, 8, 8)
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows("Qwen3ForCausalLM", layer_types=types, **sliding) == (8, None, 8)
    with pytest.raises(UnsupportedModel, match="layer_types"):
        windows("Qwen3ForCausalLM", layer_types=["linear_attention"] * 3)


def test_frequencies_are_float32(tiny_llama):
    frequencies, factor = ModelConfig.from_hf(tiny_llama).rope.frequencies(16)
    assert (frequencies.dtype, frequencies.shape, factor) == (torch.float32, (8,), 1.0)
