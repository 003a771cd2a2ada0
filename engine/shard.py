"""What one rank holds of a model: its weights, and the size of its KV.

1. ``load_shard`` checks folder and memory and loads this rank's weights.
2. All ranks agree on a number of blocks (``fitting_blocks``; the smallest counts), a connector allocates the region.
3. ``rank`` joins both. The region belongs to the connector, which frees it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from twinpool.engine.checkpoint import Checkpoint
from twinpool.engine.cuda_graphs import DECODE_SIZES, CudaCapture
from twinpool.engine.errors import DoesNotFit, UnsupportedModel
from twinpool.engine.kv_cache import KVCache
from twinpool.engine.loader import Loaded, Progress, Weights, load
from twinpool.engine.memory import GIB, available_bytes
from twinpool.engine.model_config import ModelConfig
from twinpool.engine.models.decoder import Decoder
from twinpool.engine.models.registry import FAMILIES
from twinpool.engine.parallel import ParallelContext
from twinpool.engine.rank import Rank
from twinpool.engine.runner import ModelRunner
from twinpool.kernels.choice import KernelName, kernels_for
from twinpool.kernels.native_library import NativeUnavailable
from twinpool.kernels.tiles import AttentionWorkload
from twinpool.kv_transfer.layout import DTYPES, KVLayout, RankLayout

CPU_KV_BYTES = 1 << 30
CUDA_KV_SHARE = 0.85
TUNED_CONTEXT = 4096
TUNED_KV_BYTES = 512 << 20
"""Keys of a request, and KV of a batch, on which attention is timed at most: more than any cache of a GPU holds."""


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Steps that a worker is configured for; attention's tiles are timed on them. Without a length, the model's."""

    max_num_seqs: int
    prefill_chunk: int
    max_model_len: int | None

    def workload(
        self, config: ModelConfig, parallel: ParallelContext, block_size: int, dtype: str
    ) -> AttentionWorkload:
        """What attention of a rank does in them."""
        heads = parallel.shard(config.num_heads, "number of attention heads")
        kv_heads = parallel.kv_heads(config.num_kv_heads)
        windows = config.windows[slice(*parallel.layers(config.num_layers))]
        token_bytes = 2 * (kv_heads[1] - kv_heads[0]) * config.head_dim * DTYPES[dtype].itemsize
        fitting = max(block_size, TUNED_KV_BYTES // (self.max_num_seqs * token_bytes))
        return AttentionWorkload(
            heads=heads[1] - heads[0],
            kv_heads=kv_heads[1] - kv_heads[0],
            head_dim=config.head_dim,
            block_size=block_size,
            dtype=dtype,
            window=None if None in windows else max(window for window in windows if window is not None),
            batch=self.max_num_seqs,
            context=min(self.max_model_len or config.max_position_embeddings, TUNED_CONTEXT, fitting),
            chunk=self.prefill_chunk,
        )


@dataclass(frozen=True, slots=True)
class Shard:
    """A loaded rank; see the module."""

    config: ModelConfig
    layout: KVLayout
    rank_layout: RankLayout
    parallel: ParallelContext
    device: torch.device
    loaded: Loaded[Decoder]

    def fitting_blocks(self, num_blocks: int | None, kv_memory_bytes: int | None) -> int:
        """KV blocks, the null block included: ``num_blocks``, or what fits ``kv_memory_bytes``.

        Without both, KV takes 1 GiB on CPU and 85 % of the memory that is left on a GPU.

        Raises:
            DoesNotFit: fewer than two blocks, or more than the device has left.
        """
        block_bytes = self.rank_layout.block_bytes
        available = available_bytes(self.device)
        if num_blocks is None:
            share = CPU_KV_BYTES
            if self.device.type == "cuda" and available is not None:
                share = int(available * CUDA_KV_SHARE)
            num_blocks = (share if kv_memory_bytes is None else kv_memory_bytes) // block_bytes
        if num_blocks < 2:
            raise DoesNotFit(f"{num_blocks} KV blocks of {block_bytes} bytes are too few; give KV more memory")
        if available is not None and num_blocks * block_bytes > available:
            raise DoesNotFit(
                f"{num_blocks} KV blocks of {block_bytes} bytes take {num_blocks * block_bytes / GIB:.2f} GiB, but "
                f"{self.device} has {available / GIB:.2f} GiB left beside the weights; lower num_blocks or "
                "kv_memory_gib, or raise tp_size or pp_size"
            )
        return num_blocks

    def layout_of(self, rank: int) -> RankLayout:
        """What another rank of the worker holds."""
        place, config = self.parallel.at(rank), self.config
        return RankLayout(self.layout, *place.layers(config.num_layers), *place.kv_heads(config.num_kv_heads))

    def rank(self, region: torch.Tensor) -> Rank:
        """This rank, with a region of whole blocks."""
        runner = ModelRunner(self.loaded.model, KVCache(region, self.rank_layout), self.device)
        # Collectives and the hand-over between stages are not captured.
        if self.device.type == "cuda" and self.parallel.size == 1:
            blocks = -(-self.config.max_position_embeddings // self.layout.block_size)
            runner.capture(CudaCapture(), DECODE_SIZES, min(blocks, runner.cache.num_blocks))
        return Rank(runner, self.parallel, self.config.num_layers, self.config.hidden_size)


def load_shard(
    model_folder: Path,
    *,
    dtype: str,
    device: torch.device,
    block_size: int,
    parallel: ParallelContext,
    kernels: KernelName = "auto",
    tuned_for: StepSizes | None = None,
    progress: Progress | None = None,
) -> Shard:
    """Loads what ``parallel`` says of a model.

    ``dtype`` is a name of ``kv_transfer.layout.DTYPES`` or "auto" (the checkpoint's). ``kernels`` is explained at
    ``kernels_for``; they use as many threads as torch does now. ``tuned_for`` has attention's tiles timed on a GPU,
    unless they are known.

    Raises:
        UnsupportedModel: see ``ModelConfig.from_hf`` and ``loader.load``; or the model cannot be cut like this; or the
            kernels do not exist here.
        DoesNotFit: the weights are larger than the device's memory.
    """
    config = ModelConfig.from_hf(model_folder)
    name = config.dtype if dtype == "auto" else dtype
    if name not in DTYPES:
        raise UnsupportedModel(f"dtype {dtype!r} is not supported; use auto, {', '.join(DTYPES)}")
    if parallel.pp_size > config.num_layers:
        raise UnsupportedModel(f"pp_size {parallel.pp_size} is more than the {config.num_layers} layers of the model")
    layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, block_size, name)
    rank_layout = RankLayout(layout, *parallel.layers(config.num_layers), *parallel.kv_heads(config.num_kv_heads))
    family = FAMILIES[config.architecture]
    try:
        workload = None if tuned_for is None else tuned_for.workload(config, parallel, block_size, name)
        operators = kernels_for(kernels, device, DTYPES[name], torch.get_num_threads(), workload)
    except NativeUnavailable as error:
        raise UnsupportedModel(f"model.kernels is {kernels}: {error}") from error
    except ImportError as error:
        raise UnsupportedModel(str(error)) from error

    def build_whole(weights: Weights) -> Decoder:
        return family(weights, config, ParallelContext(), operators)

    def build(weights: Weights) -> Decoder:
        return family(weights, config, parallel, operators)

    checkpoint = Checkpoint.open(model_folder)
    loaded = load(checkpoint, build_whole, build, dtype=DTYPES[name], device=device, progress=progress)
    return Shard(config, layout, rank_layout, parallel, device, loaded)
