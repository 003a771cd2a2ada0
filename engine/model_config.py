"""Facts about a model, read once from a Hugging Face folder (config.json and generation_config.json).

A model that needs something this engine lacks is refused here, by name, before any weight is read. Keys that
``transformers``' own implementation of an architecture ignores are ignored here too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from twinpool.engine.checkpoint import Checkpoint
from twinpool.engine.errors import UnsupportedModel
from twinpool.engine.hf_config import Fields, read_config, read_json
from twinpool.engine.rope import RopeParameters, read_rope

DTYPES = ("float32", "bfloat16", "float16")
LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """A mixture of experts: of ``num_experts``, ``num_chosen`` work on each token, in ``layers``.

    ``normalise``: the weights of those chosen add up to 1.
    """

    num_experts: int
    num_chosen: int
    intermediate_size: int
    normalise: bool
    layers: frozenset[int]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """An architecture's hyperparameters. Sizes in elements.

    ``windows`` gives each layer's sliding window in tokens (None: full attention); layers with a window use
    ``local_rope`` if there is one. ``attention_scale`` multiplies query · key. ``logit_soft_cap`` bounds the logits.
    ``dtype`` is the checkpoint's. ``revision`` identifies content: equal for equal weights on any machine (see
    ``Checkpoint.fingerprint``).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention_scale: float
    rms_norm_eps: float
    rope: RopeParameters
    local_rope: RopeParameters | None
    windows: tuple[int | None, ...]
    attention_bias: bool
    mlp_bias: bool
    experts: ExpertConfig | None
    logit_soft_cap: float | None
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
        architecture, fields = read_config(folder / "config.json")
        num_layers = fields.integer("num_hidden_layers")
        num_heads = fields.integer("num_attention_heads")
        hidden_size = fields.integer("hidden_size")
        num_kv_heads = fields.integer("num_key_value_heads", num_heads)
        head_dim = fields.integer("head_dim", hidden_size // num_heads)
        if num_heads % num_kv_heads:
            raise fields.refuse("num_key_value_heads", f"does not divide num_attention_heads ({num_heads})")
        if head_dim % 2:
            raise fields.refuse("head_dim", "must be even for rotary embeddings")
        rope, local_rope = _ropes(fields, architecture)
        soft_cap = fields.raw.get("final_logit_softcapping")
        return cls(
            architecture=architecture,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            attention_scale=_attention_scale(fields, architecture, head_dim),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope=rope,
            local_rope=local_rope,
            windows=_windows(fields, architecture, num_layers),
            attention_bias=fields.flag("attention_bias"),
            mlp_bias=fields.flag("mlp_bias"),
            experts=_experts(fields, architecture, num_layers),
            logit_soft_cap=None if soft_cap is None else fields.number("final_logit_softcapping", 0.0),
            tie_word_embeddings=fields.flag("tie_word_embeddings"),
            max_position_embeddings=fields.integer("max_position_embeddings"),
            dtype=_dtype(fields),
            eos_ids=_eos_ids(fields, folder / "generation_config.json"),
            revision=Checkpoint.open(folder).fingerprint(),
        )

    @property
    def required_experts(self) -> ExpertConfig:
        """``experts`` of an architecture that always has them."""
        if self.experts is None:
            raise AssertionError(f"{self.architecture} has no experts")
        return self.experts


def _attention_scale(fields: Fields, architecture: str, head_dim: int) -> float:
    scalar = fields.number("query_pre_attn_scalar", head_dim) if architecture == "Gemma3ForCausalLM" else head_dim
    if scalar <= 0:
        raise fields.refuse("query_pre_attn_scalar", "should be positive")
    return float(scalar**-0.5)


def _ropes(fields: Fields, architecture: str) -> tuple[RopeParameters, RopeParameters | None]:
    """Rotary embeddings of all layers, and those of layers with a sliding window if they differ."""
    max_positions = fields.integer("max_position_embeddings")
    try:
        if architecture != "Gemma3ForCausalLM":
            return read_rope(fields.raw, max_positions), None
        # rope_parameters by layer type (transformers 5); before, rope_scaling applied to full attention only.
        by_type = fields.raw.get("rope_parameters") or {}
        if not isinstance(by_type, dict) or by_type.keys() - LAYER_TYPES:
            raise ValueError(f"rope_parameters should be given by layer type, not {by_type!r}")
        full = {**(by_type.get("full_attention") or {}), **(fields.raw.get("rope_scaling") or {})}
        local = by_type.get("sliding_attention") or {}
        shared = {"original_max_position_embeddings": fields.raw.get("original_max_position_embeddings")}
        return (
            read_rope({**shared, "rope_theta": fields.raw["rope_theta"], "rope_parameters": full}, max_positions),
            read_rope({"rope_theta": fields.raw["rope_local_base_freq"], "rope_parameters": local}, max_positions),
        )
    except ValueError as error:
        raise UnsupportedModel(f"{fields.path}: {error}") from error


def _windows(fields: Fields, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    """Sliding windows by layer, as transformers decides them."""
    if architecture == "LlamaForCausalLM":
        return (None,) * num_layers
    window = fields.integer("sliding_window") if fields.raw.get("sliding_window") is not None else None
    if architecture in ("MistralForCausalLM", "MixtralForCausalLM"):
        return (window,) * num_layers
    types = fields.raw.get("layer_types")
    if architecture == "Gemma3ForCausalLM":
        if types is None:
            pattern = fields.integer("sliding_window_pattern")
            types = [
                "full_attention" if layer % pattern == 0 else "sliding_attention" for layer in range(1, num_layers + 1)
            ]
    elif not fields.flag("use_sliding_window"):
        window = None
    if architecture == "Qwen3MoeForCausalLM":
        return (window,) * num_layers
    if types is None:
        first = fields.raw.get("max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if not isinstance(types, list) or len(types) != num_layers or set(types) - LAYER_TYPES:
        raise fields.refuse("layer_types", "should name full_attention or sliding_attention for every layer")
    if window is None and "sliding_attention" in types:
        raise fields.refuse("layer_types", "has sliding layers, but no sliding_window is in use")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _experts(fields: Fields, architecture: str, num_layers: int) -> ExpertConfig | None:
    if architecture == "MixtralForCausalLM":
        key, inner, normalise, layers = "num_local_experts", "intermediate_size", True, list(range(num_layers))
    elif architecture == "Qwen3MoeForCausalLM":
        # transformers 5 writes num_local_experts, published checkpoints have num_experts.
        key = "num_local_experts" if fields.raw.get("num_local_experts") is not None else "num_experts"
        inner, normalise = "moe_intermediate_size", fields.flag("norm_topk_prob")
        step, dense = fields.integer("decoder_sparse_step"), fields.raw.get("mlp_only_layers") or []
        layers = [layer for layer in range(num_layers) if (layer + 1) % step == 0 and layer not in dense]
    else:
        return None
    count, chosen = fields.integer(key), fields.integer("num_experts_per_tok")
    if chosen > count:
        raise fields.refuse("num_experts_per_tok", f"is more than the {count} experts")
    return ExpertConfig(count, chosen, fields.integer(inner), normalise, frozenset(layers))


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
    for source in (Fields(generation, read_json(generation)) if generation.is_file() else fields, fields):
        ids = source.raw.get("eos_token_id")
        if ids is None:
            continue
        ids = ids if isinstance(ids, list) else [ids]
        if not all(isinstance(token, int) for token in ids):
            raise source.refuse("eos_token_id", "should be a token id or a list of them")
        return frozenset(ids)
    return frozenset()
