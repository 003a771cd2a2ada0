"""The other families against transformers, with weights that transformers itself wrote."""

from __future__ import annotations

import pytest
import torch

COMMON = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
SLIDING = {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1}
CONFIGS = {
    "mistral": ("MistralConfig", {"sliding_window": None, "head_dim": 32}),
    "mistral-sliding": ("MistralConfig", {"sliding_window": 9}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2-sliding": ("Qwen2Config", SLIDING),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "qwen3-sliding": ("Qwen3Config", {"head_dim": 32, "attention_bias": True, **SLIDING}),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_family_equals_transformers(name, tmp_path, make_harness, reference, reference_greedy, random_prompt):
    import transformers

    kind, changes = CONFIGS[name]
    config = {"MistralConfig": transformers.MistralConfig, "Qwen2Config": transformers.Qwen2Config}.get(
        kind, transformers.Qwen3Config
    )(**COMMON, **changes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 1.5 / parameter.shape[-1] ** 0.5 if parameter.dim() == 2 else 0.3
            parameter.copy_(torch.randn_like(parameter) * scale + (parameter.dim() == 1))
    model.save_pretrained(tmp_path)
    model = reference(tmp_path)
    harness = make_harness(tmp_path)
    short, long = harness.request(random_prompt(10), 8), harness.request(random_prompt(37), 8)
    while len(long.output_ids) < 8:
        running = [r for r in (short, long) if len(r.output_ids) < 8]
        harness.step([(r, min(16, r.num_tokens - r.num_computed_tokens)) for r in running])
    for request in (short, long):
        assert request.output_ids == reference_greedy(model, request.prompt_ids, 8)
    with torch.inference_mode():
        expected = model(torch.tensor([long.prompt_ids + long.output_ids[:-1]])).logits[0, -1]
    torch.testing.assert_close(harness.sampler.calls[-1][-1], expected, rtol=1e-4, atol=1e-4)
