"""Facts about a model, read once from a Hugging Face folder. The only reader of config.json and generation_config.json.

A model that needs something this engine lacks is refused here, by name, before any weight is read. Keys that
``transformers``' own implementation of an architecture ignores are ignored here too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinpool.engine.checkpoint import Checkpoint
from twinpool.engine.errors import UnsupportedModel
from twinpool.engine.rope import RopeParameters, read_rope

DTYPES = ("float32", "bfloat16", "float16")
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """An architecture's hyperparameters. Sizes in elements.

    ``windows`` gives each layer's sliding window in tokens (None: full attention). ``dtype`` is the checkpoint's.
    ``revision`` identifies content: equal for equal weights on any machine (see ``Checkpoint.fingerprint``).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeParameters
    windows: tuple[int | None, ...]
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    max_position_embeddings: int
    dtype: str
    eos_ids: frozenset[int]
    revision: str

    @classmethod
    def from_hf(cls, folder: Path) -> ModelConfig:
        """Reads ``folder``.

        Raises:
            UnsupportedModel: not a model folder, unknown architecture, quantised weights, or an unsupported feature.
        """
        path = folder / "config.json"
        if not path.is_file():
            raise UnsupportedModel(f"{folder} has no config.json; give a Hugging Face model folder")
        fields = Fields(path, _read_json(path))
        architecture = _architecture(fields)
        _refuse_features(fields)
        num_layers = fields.integer("num_hidden_layers")
        num_heads = fields.integer("num_attention_heads")
        hidden_size = fields.integer("hidden_size")
        num_kv_heads = fields.integer("num_key_value_heads", num_heads)
        head_dim = fields.integer("head_dim", 128 if architecture == "Qwen3ForCausalLM" else hidden_size // num_heads)
        if num_heads % num_kv_heads:
            raise fields.refuse("num_key_value_heads", f"does not divide num_attention_heads ({num_heads})")
        if head_dim % 2:
            raise fields.refuse("head_dim", "must be even for rotary embeddings")
        max_positions = fields.integer("max_position_embeddings")
        try:
            rope = read_rope(fields.raw, max_positions)
        except ValueError as error:
            raise UnsupportedModel(f"{path}: {error}") from error
        return cls(
            architecture=architecture,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope=rope,
            windows=_windows(fields, architecture, num_layers),
            attention_bias=fields.flag("attention_bias"),
            mlp_bias=fields.flag("mlp_bias"),
            tie_word_embeddings=fields.flag("tie_word_embeddings"),
            max_position_embeddings=max_positions,
            dtype=_dtype(fields),
            eos_ids=_eos_ids(fields, folder / "generation_config.json"),
            revision=Checkpoint.open(folder).fingerprint(),
        )


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
    "dual_chunk_attention_config": (),
}
"""Keys that change what a model computes, and the values (besides null) under which this engine computes it right."""


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise UnsupportedModel(f"{path} should hold a JSON object")
    return value


def _architecture(fields: Fields) -> str:
    names = fields.raw.get("architectures") or []
    known = [name for name in names if name in ARCHITECTURES] if isinstance(names, list) else []
    if len(known) != 1:
        raise fields.refuse("architectures", f"is not supported; supported are {', '.join(ARCHITECTURES)}")
    return str(known[0])


def _refuse_features(fields: Fields) -> None:
    quantisation = fields.raw.get("quantization_config") or fields.raw.get("compression_config")
    if quantisation:
        method = quantisation.get("quant_method", "unknown") if isinstance(quantisation, dict) else quantisation
        raise UnsupportedModel(
            f"{fields.path}: the checkpoint is quantised ({method}); use the float or bfloat16 checkpoint of the model"
        )
    for key, values in FEATURES.items():
        value = fields.raw.get(key)
        if value is not None and value not in values:
            raise fields.refuse(key, "is a feature that this engine does not support")


def _windows(fields: Fields, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    """Sliding windows by layer, as transformers decides them."""
    if architecture == "LlamaForCausalLM":
        return (None,) * num_layers
    window = fields.integer("sliding_window") if fields.raw.get("sliding_window") is not None else None
    if architecture == "MistralForCausalLM":
        if "sliding_window" not in fields.raw:
            window = 4096
        return (window,) * num_layers
    if not fields.flag("use_sliding_window"):
        window = None
    types = fields.raw.get("layer_types")
    if types is None:
        first = fields.raw.get("max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if not isinstance(types, list) or len(types) != num_layers or set(types) - {"full_attention", "sliding_attention"}:
        raise fields.refuse("layer_types", "should name full_attention or sliding_attention for every layer")
    if window is None and "sliding_attention" in types:
        raise fields.refuse("layer_types", "has sliding layers, but no sliding_window is in use")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _dtype(fields: Fields) -> str:
    key = "dtype" if fields.raw.get("dtype") is not None else "torch_dtype"
    dtype = fields.raw.get(key)
    if dtype is None:
        return "float32"
    if dtype not in DTYPES:
        raise fields.refuse(key, f"is not supported; supported are {', '.join(DTYPES)}")
    return str(dtype)


def _eos_ids(fields: Fields, generation: Path) -> frozenset[int]:
    """End-of-sequence ids: generation_config.json's if it has any, else config.json's."""
    for source in (Fields(generation, _read_json(generation)) if generation.is_file() else fields, fields):
        ids = source.raw.get("eos_token_id")
        if ids is None:
            continue
        ids = ids if isinstance(ids, list) else [ids]
        if not all(isinstance(token, int) for token in ids):
            raise source.refuse("eos_token_id", "should be a token id or a list of them")
        return frozenset(ids)
    return frozenset()
