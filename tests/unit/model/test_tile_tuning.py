"""The choice of attention's tiles, with a scripted timer and a launch that starts nothing."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources

from twinpool.config import Config
from twinpool.engine.model_config import ModelConfig
from twinpool.engine.parallel import ParallelContext
from twinpool.engine.shard import TUNED_CONTEXT, TUNED_KV_BYTES, StepSizes
from twinpool.kernels import choice
from twinpool.kernels.choice import kernels_for
from twinpool.kernels.tile_cache import Environment, sources_hash, tuned_tiles
from twinpool.kernels.tile_tuning import MARGIN, TIME_LIMIT_S, TileTuner, decode_shapes, prefill_shapes
from twinpool.kernels.tiles import DEFAULT_TILES, AttentionWorkload, Tiles, Tuning
from twinpool.worker.rank_setup import tuned_for

CPU = torch.device("cpu")
WORK = AttentionWorkload(8, 2, 128, 16, "bfloat16", None, batch=12, context=600, chunk=40)
ENVIRONMENT = Environment("NVIDIA H100", (9, 0), "3.9.0", "abc")


@dataclass
class Gpu:
    """Launches nothing; a call takes what ``cost`` makes of the arguments of its main kernel."""

    cost: Callable[[str, dict[str, Any]], float]
    launched: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    timed: int = 0

    def launch(self, kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
        if kernel.__name__ != "combine_kernel":
            self.launched.append((kernel.__name__, arguments))

    def timer(self, call: Callable[[], object]) -> float:
        self.timed += 1
        call()
        return self.cost(*self.launched[-1])

    def tune(self, work: AttentionWorkload = WORK, clock: Callable[[], float] = lambda: 0.0) -> Tuning:
        return TileTuner(work, CPU, 4, self.timer, clock, self.launch).tune()


def favourite(decode: int, prefill: int, num_splits: int = 3) -> Gpu:
    """A device on which the candidates of these numbers are the fastest, and keys split so often."""
    best = {"decode_kernel": decode_shapes(WORK)[decode], "prefill_kernel": prefill_shapes(WORK)[prefill]}

    def cost(kernel: str, a: dict[str, Any]) -> float:
        shape = (a["ROWS"], a["TILE"], a["num_warps"], a["num_stages"])
        right = best[kernel]
        fast = shape == (right.rows, right.keys, right.warps, right.stages)
        splits = abs(a.get("num_splits", num_splits) - num_splits) / 10
        return (1.0 if fast else 2.0) + splits

    return Gpu(cost)


def test_there_are_candidates_to_choose_from():
    for dim, group in ((64, 4), (128, 1), (128, 7), (256, 2)):
        work = replace(WORK, heads=2 * group, head_dim=dim)
        assert len(set(decode_shapes(work))) >= 3
        assert len(set(prefill_shapes(work))) >= 3
        assert all(shape.rows == 16 for shape in decode_shapes(work))
    assert len(decode_shapes(replace(WORK, dtype="float32"))) == 1


@pytest.mark.parametrize(("decode", "prefill"), [(0, 0), (1, 1), (-1, -1)])
def test_the_fastest_wins(decode: int, prefill: int):
    tuning = favourite(decode, prefill).tune()
    assert tuning.whole
    assert tuning.tiles.decode == decode_shapes(WORK)[decode]
    assert tuning.tiles.prefill == prefill_shapes(WORK)[prefill]
    default, best = tuning.milliseconds["prefill"]
    assert (default, best) == ((2.0, 1.0) if prefill else (1.0, 1.0))


def test_the_number_of_splits_is_chosen_too():
    # Batches of 8 and 12 requests of 2 heads are 16 and 24 programs; 4, 2 and 8 for each of 4 processors are 16, 8, 32.
    assert favourite(0, 0, num_splits=1).tune().tiles.programs_per_processor == 4
    assert favourite(0, 0, num_splits=2).tune().tiles.programs_per_processor == 8


def test_noise_changes_nothing():
    def cost(kernel: str, a: dict[str, Any]) -> float:
        return 1.0 if a["TILE"] == 64 and a["num_warps"] in (4, 8) and a["num_stages"] == 3 else MARGIN + 0.001

    tiles = Gpu(cost).tune().tiles
    assert (tiles.decode, tiles.prefill) == (decode_shapes(WORK)[0], prefill_shapes(WORK)[0])
    assert tiles.programs_per_processor == DEFAULT_TILES.programs_per_processor


def test_what_the_device_cannot_hold_loses():
    def cost(kernel: str, a: dict[str, Any]) -> float:
        if (a["TILE"], a["num_stages"]) == (64, 3):  # the defaults
            raise OutOfResources(200, 100, "shared memory")
        return float(a["TILE"])

    tuning = Gpu(cost).tune()
    assert tuning.tiles.decode != decode_shapes(WORK)[0]
    assert tuning.tiles.prefill != prefill_shapes(WORK)[0]


def test_time_runs_out():
    gpu = favourite(-1, -1)
    tuning = gpu.tune(clock=lambda: 0.0 if gpu.timed < 4 else TIME_LIMIT_S + 1)
    assert not tuning.whole
    assert tuning.tiles.prefill == prefill_shapes(WORK)[0]
    assert gpu.timed == 4 + 2 + 1  # two decode tiles over two batches, then what is used now


def test_the_winner_is_kept_and_used_at_the_next_start(tmp_path: Path):
    first = tuned_tiles(WORK, ENVIRONMENT, tmp_path / "new", favourite(1, 1).tune)
    assert first.decode == decode_shapes(WORK)[1]

    def never() -> Tuning:
        raise AssertionError("timed again")

    assert tuned_tiles(WORK, ENVIRONMENT, tmp_path / "new", never) == first
    assert [file.suffix for file in (tmp_path / "new").iterdir()] == [".json"]


@pytest.mark.parametrize(
    "change",
    [
        {"device": "NVIDIA B200"},
        {"capability": (10, 0)},
        {"triton": "3.9.1"},
        {"sources": "abd"},
    ],
    ids=str,
)
def test_another_device_or_version_is_timed(tmp_path: Path, change: dict[str, Any]):
    tuned_tiles(WORK, ENVIRONMENT, tmp_path, favourite(1, 1).tune)
    other = tuned_tiles(WORK, replace(ENVIRONMENT, **change), tmp_path, favourite(0, 0).tune)
    assert other.decode == decode_shapes(WORK)[0]
    assert len(list(tmp_path.iterdir())) == 2
    assert tuned_tiles(replace(WORK, batch=13), ENVIRONMENT, tmp_path, favourite(2, 0).tune).decode != other.decode


def edited(**changes: Any) -> Callable[[str], str]:
    return lambda text: json.dumps(json.loads(text) | changes)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-9],
        lambda text: "",
        lambda text: "[]",
        lambda text: "\0" * len(text),
        edited(decode=[16, 1024, 4, 3]),
        edited(prefill=None),
        edited(programs_per_processor=1000),
        edited(identity={}),
        edited(identity="x"),
    ],
)
def test_a_damaged_or_foreign_file_is_timed_again(tmp_path: Path, damage: Callable[[str], str]):
    tuned_tiles(WORK, ENVIRONMENT, tmp_path, favourite(1, 1).tune)
    (file,) = tmp_path.iterdir()
    whole = file.read_text()
    file.write_text(damage(whole))
    tuned_tiles(WORK, ENVIRONMENT, tmp_path, favourite(0, 0).tune)
    assert json.loads(file.read_text())["decode"] == [16, 64, 4, 3]


def test_half_a_tuning_is_used_and_not_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    found = Tuning(Tiles(decode_shapes(WORK)[1]), {"decode": (2.0, 1.0)}, whole=False)
    assert tuned_tiles(WORK, ENVIRONMENT, tmp_path, lambda: found) == found.tiles
    assert not list(tmp_path.iterdir())
    assert "the next start goes on" in caplog.text


def test_a_folder_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").write_text("")
    tiles = tuned_tiles(WORK, ENVIRONMENT, tmp_path / "file", favourite(1, 1).tune)
    assert tiles.decode == decode_shapes(WORK)[1]
    assert "are not kept" in caplog.text


def test_a_worker_does_without_if_timing_fails(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    def fails(device: torch.device) -> Environment:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    monkeypatch.setattr(Environment, "of", fails)
    assert choice._tiles_for(CPU, WORK) == DEFAULT_TILES
    assert "keeps its default tiles" in caplog.text


def test_sources_decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from twinpool.kernels import tile_cache

    before = sources_hash()
    for name in tile_cache.SOURCES:
        (tmp_path / name).write_bytes(Path(tile_cache.__file__).with_name(name).read_bytes())
    monkeypatch.setattr(tile_cache, "__file__", str(tmp_path / "tile_cache.py"))
    assert sources_hash() == before
    (tmp_path / "tiles.py").write_text("# changed")
    assert sources_hash() != before


def test_the_workload_of_a_rank(tiny_llama: Path):
    config = replace(ModelConfig.from_hf(tiny_llama), num_heads=32, num_kv_heads=8, head_dim=128)
    config = replace(config, windows=(512, None), num_layers=2, max_position_embeddings=131072)
    sizes = StepSizes(max_num_seqs=64, prefill_chunk=512, max_model_len=None)
    whole = sizes.workload(config, ParallelContext(), 16, "bfloat16")
    assert (whole.heads, whole.kv_heads, whole.group, whole.window) == (32, 8, 4, None)
    assert whole.context * 64 * 8 * 128 * 2 * 2 == TUNED_KV_BYTES
    rank = ParallelContext(tp_size=4, tp_rank=3, pp_size=2, pp_rank=0)
    part = replace(sizes, max_num_seqs=1).workload(config, rank, 16, "bfloat16")
    assert (part.heads, part.kv_heads, part.window, part.context) == (8, 2, 512, TUNED_CONTEXT)
    assert replace(sizes, max_model_len=100).workload(config, rank, 16, "float32").context == 100


def test_the_log_names_what_was_gained(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    tuned_tiles(WORK, ENVIRONMENT, tmp_path, favourite(1, 1).tune)
    assert "prefill 2.000 -> 1.000" in caplog.text


def test_kernels_for_a_gpu_take_the_tuned_tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from twinpool.kernels import tile_tuning

    cuda = torch.device("cuda", 0)
    monkeypatch.setenv("TWINPOOL_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=4))
    monkeypatch.setattr(Environment, "of", lambda device: ENVIRONMENT)
    monkeypatch.setattr(tile_tuning, "tune_on", lambda device, work, clock: favourite(1, 2).tune(work, clock))
    first = kernels_for("auto", cuda, torch.bfloat16, 1, WORK)
    assert (first._tiles.decode, first._tiles.prefill) == (decode_shapes(WORK)[1], prefill_shapes(WORK)[2])
    monkeypatch.delattr(tile_tuning.TileTuner, "tune")
    assert kernels_for("auto", cuda, torch.bfloat16, 1, WORK)._tiles == first._tiles
    assert kernels_for("auto", cuda, torch.bfloat16, 1)._tiles == DEFAULT_TILES


def test_the_configuration_turns_it_off():
    on = Config().model
    assert tuned_for(on, Config().decode.engine) == StepSizes(64, 512, None)
    assert tuned_for(on.model_copy(update={"kernel_tuning": "off"}), Config().decode.engine) is None
