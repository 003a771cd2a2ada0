"""Typed access to a Hugging Face config.json, and the refusal of what this engine cannot compute.

A key that is absent means what ``transformers``' implementation of the architecture takes it to mean (``DEFAULTS``); a
key that changes what a model computes and is not known here refuses the model (``FEATURES``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinpool.engine.errors import UnsupportedModel

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "Gemma3ForCausalLM": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "tie_word_embeddings": True,
    },
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"num_key_value_heads": 8, "sliding_window": 4096},
    "MixtralForCausalLM": {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "Qwen2ForCausalLM": {"num_key_value_heads": 32, "sliding_window": 4096},
    "Qwen3ForCausalLM": {"num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
    "Qwen3MoeForCausalLM": {
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
    },
}
"""What ``transformers`` takes for absent keys, by supported architecture (where it differs from the common default)."""

FEATURES: Mapping[str, tuple[object, ...]] = {
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (1.0,),
    "rope_interleaved": (False,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
    "logits_scaling": (1.0,),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "is_encoder_decoder": (False,),
    "use_bidirectional_attention": (False,),
    "dual_chunk_attention_config": (),
}
"""Keys that change what a model computes, and the values (besides null) under which this engine computes it right."""

SUPPORTED: Mapping[str, Mapping[str, tuple[object, ...] | None]] = {
    "Gemma3ForCausalLM": {
        "hidden_act": None,
        "hidden_activation": ("gelu_pytorch_tanh",),
        "final_logit_softcapping": None,
    },
    "MixtralForCausalLM": {"num_local_experts": None},
    "Qwen3MoeForCausalLM": {"num_experts": None, "num_local_experts": None},
}
"""Where an architecture differs from ``FEATURES``; None: every value."""

MULTIMODAL_KEYS = ("vision_config", "audio_config", "text_config")


@dataclass(frozen=True, slots=True)
class Fields:
    """Typed access to config.json; a missing or null key takes the default, if there is one."""

    path: Path
    raw: Mapping[str, Any]

    def refuse(self, key: str, problem: str) -> UnsupportedModel:
        """The error for ``key``."""
        return UnsupportedModel(f"{self.path}: {key} = {self.raw.get(key)!r} {problem}")

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.raw.get(key)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.refuse(key, "should be a positive integer")
        return value

    def number(self, key: str, default: float) -> float:
        """A number."""
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.refuse(key, "should be a number")
        return float(value)

    def flag(self, key: str) -> bool:
        """A boolean, false by default."""
        value = self.raw.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.refuse(key, "should be true or false")
        return bool(value)


def read_json(path: Path) -> Mapping[str, Any]:
    """A JSON object.

    Raises:
        UnsupportedModel: the file cannot be read, or holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise UnsupportedModel(f"{path} should hold a JSON object")
    return value


def read_config(path: Path) -> tuple[str, Fields]:
    """The supported architecture that ``path`` (config.json) names, and its fields with ``DEFAULTS`` filled in.

    Raises:
        UnsupportedModel: no such file, unknown architecture, several modalities, quantised weights, or an unsupported
            feature.
    """
    if not path.is_file():
        raise UnsupportedModel(f"{path.parent} has no config.json; give a Hugging Face model folder")
    fields = Fields(path, read_json(path))
    architecture = _architecture(fields)
    fields = Fields(path, {**DEFAULTS[architecture], **fields.raw})
    _refuse_features(fields, architecture)
    return architecture, fields


def _architecture(fields: Fields) -> str:
    if present := [key for key in MULTIMODAL_KEYS if fields.raw.get(key) is not None]:
        raise fields.refuse(
            "architectures",
            f"takes more than text ({', '.join(present)}), which is not supported; use a checkpoint of the language "
            f"model alone, with one of the architectures {', '.join(DEFAULTS)}",
        )
    names = fields.raw.get("architectures") or []
    known = [name for name in names if name in DEFAULTS] if isinstance(names, list) else []
    if len(known) != 1:
        raise fields.refuse("architectures", f"is not supported; supported are {', '.join(DEFAULTS)}")
    return str(known[0])


def _refuse_features(fields: Fields, architecture: str) -> None:
    quantisation = fields.raw.get("quantization_config") or fields.raw.get("compression_config")
    if quantisation:
        method = quantisation.get("quant_method", "unknown") if isinstance(quantisation, dict) else quantisation
        raise UnsupportedModel(
            f"{fields.path}: the checkpoint is quantised ({method}); use the float or bfloat16 checkpoint of the model"
        )
    for key, values in {**FEATURES, **SUPPORTED.get(architecture, {})}.items():
        value = fields.raw.get(key)
        if value is not None and values is not None and value not in values:
            raise fields.refuse(key, "is a feature that this engine does not support")
