"""Llama 2 and 3.x, and models with the same architecture (SmolLM2, TinyLlama)."""

from __future__ import annotations

from twinpool.engine.layers import Attention, GatedMLP, RMSNorm
from twinpool.engine.loader import Weights
from twinpool.engine.model_config import ModelConfig
from twinpool.engine.models.decoder import Decoder, PreNormLayer
from twinpool.engine.parallel import ParallelContext
from twinpool.kernels.interface import Kernels


def build_llama(weights: Weights, config: ModelConfig, parallel: ParallelContext, kernels: Kernels) -> Decoder:
    """Optional biases on all four attention projections and on the MLP."""

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
            ),
            RMSNorm.load(layer.at("post_attention_layernorm"), config.hidden_size, config.rms_norm_eps, kernels),
            GatedMLP.load(layer.at("mlp"), config, parallel, kernels, bias=config.mlp_bias),
        )

    return Decoder.load(weights, config, parallel, kernels, make_layer)
