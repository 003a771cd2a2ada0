"""Tiny random checkpoints that a real engine, and transformers, can load."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
VOCAB_SIZE = 300
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
COMMON: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": VOCAB_SIZE - 4,
    "eos_token_id": VOCAB_SIZE - 2,
    "pad_token_id": VOCAB_SIZE - 1,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE}),
    "mistral": ("MistralConfig", {"sliding_window": 20, "head_dim": 32}),
    "qwen2": (
        "Qwen2Config",
        {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "gemma3": (
        "Gemma3TextConfig",
        {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 12, "sliding_window_pattern": 2},
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {
            "head_dim": 32,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
        },
    ),
}
"""Families by name: the configuration class in transformers, and what differs from ``COMMON``."""

ExpertLayout = Literal["single", "fused"]
"""One matrix per expert, as published checkpoints have it, or all experts of a layer in two tensors."""


def write_tiny_model(
    family: str,
    folder: Path,
    *,
    seed: int = 0,
    sharded: bool = False,
    expert_layout: ExpertLayout = "single",
    **overrides: Any,
) -> Path:
    """Writes a checkpoint of ``family`` (a key of ``FAMILIES``) through transformers, and a tokenizer."""
    import torch
    import transformers

    name, changes = FAMILIES[family]
    config = getattr(transformers, name)(**{**COMMON, **changes, **overrides})
    model = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                # Norms are near the identity (Gemma stores its weights minus 1); biases are moved alike, no harm done.
                parameter.copy_(0.3 * noise + (family != "gemma3"))
            else:
                parameter.copy_(noise * (1.5 / parameter.shape[-1] ** 0.5))
    model.generation_config = transformers.GenerationConfig(eos_token_id=config.eos_token_id)
    model.save_pretrained(
        folder, max_shard_size="100KB" if sharded else "1GB", save_original_format=expert_layout == "single"
    )
    write_tokenizer(folder)
    return folder


def write_tiny_llama(folder: Path, *, seed: int = 0, num_shards: int = 1, **overrides: Any) -> Path:
    """Writes the checkpoint; equal arguments give equal bytes."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": VOCAB_SIZE - 4,
        "eos_token_id": VOCAB_SIZE - 2,
        "torch_dtype": "float32",
    } | overrides
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[config["torch_dtype"]]
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    for name, shape in _tiny_llama_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            weights[name] = (1.0 + 0.1 * noise).to(dtype)
        elif name == "model.embed_tokens.weight":
            weights[name] = noise.to(dtype)
        else:
            weights[name] = (noise * (1.5 / shape[-1] ** 0.5 if len(shape) == 2 else 0.1)).to(dtype)
    if num_shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        names = list(weights)
        weight_map: dict[str, str] = {}
        for shard in range(num_shards):
            file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
            part = {name: weights[name] for name in names[shard::num_shards]}
            save_file(part, folder / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(part, file)
        index = {"metadata": {"total_size": sum(w.nbytes for w in weights.values())}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": config["eos_token_id"]}))
    write_tokenizer(folder)
    return folder


def _tiny_llama_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Llama checkpoint, in Hugging Face's order."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        for name, rows, columns in (
            ("q_proj", queries, hidden),
            ("k_proj", keys, hidden),
            ("v_proj", keys, hidden),
            ("o_proj", hidden, queries),
        ):
            shapes[f"{attention}.{name}.weight"] = (rows, columns)
            if config["attention_bias"]:
                shapes[f"{attention}.{name}.bias"] = (rows,)
        for name, rows, columns in (
            ("gate_proj", inner, hidden),
            ("up_proj", inner, hidden),
            ("down_proj", hidden, inner),
        ):
            shapes[f"{mlp}.{name}.weight"] = (rows, columns)
            if config["mlp_bias"]:
                shapes[f"{mlp}.{name}.bias"] = (rows,)
        shapes[f"model.layers.{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"model.layers.{layer}.post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE: 256 bytes, some merges of common English pairs, four special tokens at the end."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    pairs = "Ġ t,h e,i n,r e,o n,Ġ a,a t,e r,Ġ s,Ġ w,o r,i s,e n,e s,Ġt he,a n,Ġ o,i t,in g,Ġ c,e d,o u,a l,Ġ p,Ġ f"
    for pair in f"{pairs},a r,Ġ b,Ġ m,i c,l e,Ġa n,Ġan d,Ġo f,Ġ in,i on,a s,Ġ d,Ġ h,en t,r o".split(","):
        left, right = pair.split(" ")
        merges.append((left, right))
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise AssertionError(f"the tokenizer has {tokenizer.get_vocab_size()} tokens, not {VOCAB_SIZE}")
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[0],
        "eos_token": SPECIAL_TOKENS[2],
        "pad_token": SPECIAL_TOKENS[3],
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2))
