"""Qwen3 with experts (30B-A3B, 235B-A22B)."""

from __future__ import annotations

from twinpool.engine.experts import ExpertNames, SparseMLP
from twinpool.engine.layers import Attention, GatedMLP, RMSNorm
from twinpool.engine.loader import Weights
from twinpool.engine.model_config import ModelConfig
from twinpool.engine.models.decoder import MLP, Decoder, PreNormLayer
from twinpool.engine.parallel import ParallelContext
from twinpool.kernels.interface import Kernels

NAMES = ExpertNames(block="mlp", gate="gate_proj", up="up_proj", down="down_proj")


def build_qwen3_moe(weights: Weights, config: ModelConfig, parallel: ParallelContext, kernels: Kernels) -> Decoder:
    """Qwen3 with experts instead of the MLP in some or all layers."""
    experts = config.required_experts

    def make_mlp(index: int, layer: Weights) -> MLP:
        if index in experts.layers:
            return SparseMLP.load(layer, NAMES, config, experts, parallel, kernels)
        return GatedMLP.load(layer.at("mlp"), config, parallel, kernels, bias=False)

    def make_layer(index: int) -> PreNormLayer:
        layer = weights.at(f"model.layers.{index}")
        return PreNormLayer(
            RMSNorm.load(layer.at("input_layernorm"), config.hidden_size, config.rms_norm_eps, kernels),
            Attention.load(
                layer.at("self_attn"),
                config,
                index,
                parallel,
                kernels,
                qkv_bias=config.attention_bias,
                output_bias=config.attention_bias,
                head_norms=True,
            ),
            RMSNorm.load(layer.at("post_attention_layernorm"), config.hidden_size, config.rms_norm_eps, kernels),
            make_mlp(index, layer),
        )

    return Decoder.load(weights, config, parallel, kernels, make_layer)
