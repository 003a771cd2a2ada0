"""What each rank of a worker would need of its device, known before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from twinpool.engine.checkpoint import Checkpoint
from twinpool.engine.errors import UnsupportedModel
from twinpool.engine.loader import Weights, size_of
from twinpool.engine.model_config import ModelConfig
from twinpool.engine.models.decoder import Decoder
from twinpool.engine.models.registry import FAMILIES
from twinpool.engine.parallel import ParallelContext
from twinpool.kernels.reference import ReferenceKernels
from twinpool.kv_transfer.layout import DTYPES, KVLayout, RankLayout


@dataclass(frozen=True, slots=True)
class RankFit:
    """Bytes of a rank's weights, and of its part of a KV block."""

    rank: int
    weight_bytes: int
    block_bytes: int


def fit(model_folder: Path, *, dtype: str, tp_size: int, pp_size: int, block_size: int) -> list[RankFit]:
    """The needs of all ranks, in order.

    Raises:
        UnsupportedModel: see ``ModelConfig.from_hf``; or the model cannot be cut like this.
    """
    config = ModelConfig.from_hf(model_folder)
    name = config.dtype if dtype == "auto" else dtype
    if pp_size > config.num_layers:
        raise UnsupportedModel(f"pp_size {pp_size} is more than the {config.num_layers} layers of the model")
    layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, block_size, name)
    checkpoint, kernels = Checkpoint.open(model_folder), ReferenceKernels(prepack=False)
    shape = ParallelContext(tp_size=tp_size, pp_size=pp_size)
    found = []
    for rank in range(shape.size):
        place = shape.at(rank)

        def build(weights: Weights, place: ParallelContext = place) -> Decoder:
            return FAMILIES[config.architecture](weights, config, place, kernels)

        held = RankLayout(layout, *place.layers(config.num_layers), *place.kv_heads(config.num_kv_heads))
        found.append(RankFit(rank, size_of(checkpoint, build, DTYPES[name]), held.block_bytes))
    return found
