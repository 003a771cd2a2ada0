"""Mixtral 8x7B and 8x22B."""

from __future__ import annotations

from twinpool.engine.experts import ExpertNames, SparseMLP
from twinpool.engine.layers import Attention, RMSNorm
from twinpool.engine.loader import Weights
from twinpool.engine.model_config import ModelConfig
from twinpool.engine.models.decoder import Decoder, PreNormLayer
from twinpool.engine.parallel import ParallelContext
from twinpool.kernels.interface import Kernels

NAMES = ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")


def build_mixtral(weights: Weights, config: ModelConfig, parallel: ParallelContext, kernels: Kernels) -> Decoder:
    """Mistral with experts in every layer."""
    experts = config.required_experts

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
                qkv_bias=False,
                output_bias=False,
            ),
            RMSNorm.load(layer.at("post_attention_layernorm"), config.hidden_size, config.rms_norm_eps, kernels),
            SparseMLP.load(layer, NAMES, config, experts, parallel, kernels),
        )

    return Decoder.load(weights, config, parallel, kernels, make_layer)
