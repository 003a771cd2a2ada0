"""Gemma 3, text only."""

from __future__ import annotations

from twinpool.engine.layers import Attention, GatedMLP, RMSNorm, Step
from twinpool.engine.loader import Weights
from twinpool.engine.model_config import ModelConfig
from twinpool.engine.models.decoder import Decoder
from twinpool.engine.parallel import ParallelContext
from twinpool.kernels.interface import Kernels


class SandwichNormLayer:
    """Attention and MLP, each between two norms; the residual stream is added after the second."""

    def __init__(
        self,
        input_norm: RMSNorm,
        attention: Attention,
        attention_norm: RMSNorm,
        mlp_input_norm: RMSNorm,
        mlp: GatedMLP,
        mlp_norm: RMSNorm,
    ) -> None:
        self._input_norm = input_norm
        self._attention = attention
        self._attention_norm = attention_norm
        self._mlp_input_norm = mlp_input_norm
        self._mlp = mlp
        self._mlp_norm = mlp_norm

    def __call__(self, step: Step) -> None:
        """Advances ``step.hidden`` and ``step.residual``."""
        hidden, residual = self._input_norm.add(step.hidden, step.residual)
        attended = self._attention_norm(self._attention(hidden, step))
        hidden, residual = self._mlp_input_norm.add(attended, residual)
        step.hidden, step.residual = self._mlp_norm(self._mlp(hidden)), residual


def build_gemma3(weights: Weights, config: ModelConfig, parallel: ParallelContext, kernels: Kernels) -> Decoder:
    """Most layers have a sliding window and rope frequencies of their own; norms store their weight minus 1."""

    def make_layer(index: int) -> SandwichNormLayer:
        layer = weights.at(f"model.layers.{index}")

        def norm(name: str) -> RMSNorm:
            return RMSNorm.load(layer.at(name), config.hidden_size, config.rms_norm_eps, kernels, unit_offset=True)

        return SandwichNormLayer(
            norm("input_layernorm"),
            Attention.load(
                layer.at("self_attn"),
                config,
                index,
                parallel,
                kernels,
                qkv_bias=config.attention_bias,
                output_bias=config.attention_bias,
                head_norms=True,
                unit_offset=True,
            ),
            norm("post_attention_layernorm"),
            norm("pre_feedforward_layernorm"),
            GatedMLP.load(layer.at("mlp"), config, parallel, kernels, bias=False, activation=kernels.gelu_tanh_mul),
            norm("post_feedforward_layernorm"),
        )

    scale = config.hidden_size**0.5
    return Decoder.load(weights, config, parallel, kernels, make_layer, embedding_scale=scale, unit_offset=True)
