"""Which function builds which architecture (``architectures`` in config.json). A new family adds a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from twinpool.engine.loader import Weights
from twinpool.engine.model_config import ModelConfig
from twinpool.engine.models.decoder import Decoder
from twinpool.engine.models.gemma3 import build_gemma3
from twinpool.engine.models.llama import build_llama
from twinpool.engine.models.mistral import build_mistral
from twinpool.engine.models.mixtral import build_mixtral
from twinpool.engine.models.qwen2 import build_qwen2
from twinpool.engine.models.qwen3 import build_qwen3
from twinpool.engine.models.qwen3_moe import build_qwen3_moe
from twinpool.engine.parallel import ParallelContext
from twinpool.kernels.interface import Kernels

Build = Callable[[Weights, ModelConfig, ParallelContext, Kernels], Decoder]

FAMILIES: Mapping[str, Build] = {
    "Gemma3ForCausalLM": build_gemma3,
    "LlamaForCausalLM": build_llama,
    "MistralForCausalLM": build_mistral,
    "MixtralForCausalLM": build_mixtral,
    "Qwen2ForCausalLM": build_qwen2,
    "Qwen3ForCausalLM": build_qwen3,
    "Qwen3MoeForCausalLM": build_qwen3_moe,
}
