from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from twinpool.engine.checkpoint import Checkpoint
from twinpool.engine.errors import UnsupportedModel
from twinpool.engine.executor import build_executor
from twinpool.engine.loader import Shard, Weights, load
from twinpool.engine.model_config import ModelConfig

CPU = torch.device("cpu")


def rewrite(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_sharded_and_single_files_load_the_same(tmp_path, make_tiny_llama, make_harness, random_prompt):
    outputs = []
    for name, shards in (("one", 1), ("three", 3)):
        harness = make_harness(make_tiny_llama(tmp_path / name, num_shards=shards))
        harness.generate(harness.request(random_prompt(20), 5))
        outputs.append(torch.cat(harness.sampler.calls))
    assert torch.equal(*outputs)


def test_tied_checkpoints_need_no_head_and_respect_one(tmp_path, make_tiny_llama, make_harness, random_prompt):
    def first_logits(folder):
        harness = make_harness(folder)
        harness.generate(harness.request(random_prompt(9), 1))
        return harness.sampler.calls[0]

    folder = make_tiny_llama(tmp_path, tie_word_embeddings=True)
    tied = first_logits(folder)
    rewrite(folder, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"] * 2}))
    torch.testing.assert_close(first_logits(folder), tied * 2)


def test_missing_unknown_and_misshapen_tensors_are_listed_together(tmp_path, make_tiny_llama, make_harness):
    folder = make_tiny_llama(tmp_path)

    def change(weights):
        del weights["model.layers.0.mlp.up_proj.weight"]
        del weights["lm_head.weight"]
        weights["model.layers.0.mlp.extra.weight"] = torch.zeros(2)
        weights["model.norm.weight"] = torch.zeros(3)
        weights["model.layers.1.input_layernorm.weight"] = torch.zeros(64, dtype=torch.int8)
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    rewrite(folder, change)
    with pytest.raises(UnsupportedModel) as refusal:
        make_harness(folder)
    message = str(refusal.value)
    assert "missing: model.layers.0.mlp.up_proj.weight, lm_head.weight" in message
    assert "unknown: model.layers.0.mlp.extra.weight" in message
    assert "inv_freq" not in message
    assert "model.norm.weight has shape [3], not [64]" in message
    assert "model.layers.1.input_layernorm.weight is stored as I8" in message


def test_broken_files_are_named(tmp_path, make_tiny_llama):
    folder = make_tiny_llama(tmp_path / "cut")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UnsupportedModel, match=r"model\.safetensors is cut short"):
        ModelConfig.from_hf(folder)
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(UnsupportedModel, match="not a safetensors file"):
        ModelConfig.from_hf(folder)
    file.unlink()
    with pytest.raises(UnsupportedModel, match="only safetensors weights are supported"):
        ModelConfig.from_hf(folder)
    folder = make_tiny_llama(tmp_path / "sharded", num_shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match=r"lacks weight files of its index: model-00002-of-00003"):
        ModelConfig.from_hf(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weights": 1}))
    with pytest.raises(UnsupportedModel, match=r"index\.json is broken"):
        ModelConfig.from_hf(folder)


def test_progress_ends_at_the_total(tmp_path, make_tiny_llama, make_harness):
    folder = make_tiny_llama(tmp_path, torch_dtype="bfloat16")
    calls: list[tuple[int, int]] = []
    built = build_executor(
        folder,
        dtype="float32",
        device=CPU,
        block_size=16,
        num_blocks=8,
        allocate=lambda size, device: torch.zeros(size, dtype=torch.uint8),
        make_sampler=lambda vocab_size, stop_ids, device: pytest.fail("no sampling") if vocab_size < 0 else None,
        progress=lambda done, total: calls.append((done, total)),
    )
    stored = sum(w.nbytes for w in load_file(folder / "model.safetensors").values())
    assert calls[-1] == (stored, stored)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    assert built.shard.loaded.num_bytes == stored
    assert built.shard.loaded.gb_per_s > 0


def test_shards_are_slices_of_what_is_stored(tiny_llama):
    name, shape = "model.layers.0.mlp.down_proj.weight", (64, 128)
    checkpoint = Checkpoint.open(tiny_llama)

    def whole(weights: Weights) -> None:
        for entry in checkpoint.entries.values():
            weights.take(entry.name, entry.shape)

    def part(weights: Weights) -> torch.Tensor:
        return weights.at("model.layers.0").at("mlp").take("down_proj.weight", shape, Shard(1, 32, 64))

    loaded = load(checkpoint, whole, part, dtype=torch.float32, device=CPU)
    assert torch.equal(loaded.model, load_file(tiny_llama / "model.safetensors")[name][:, 32:64])
    assert loaded.num_bytes == 64 * 32 * 4
