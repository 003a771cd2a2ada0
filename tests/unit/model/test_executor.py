from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from steps import run_step

from twinpool.engine.errors import DoesNotFit, UnsupportedModel
from twinpool.engine.executor import build_executor
from twinpool.engine.parallel import ParallelContext
from twinpool.engine.plan import ScheduledRequest, StepPlan
from twinpool.engine.runner import layer_ranges


def test_layers_are_announced_in_order_once_their_kv_is_written(tmp_path, make_tiny_llama, make_harness, random_prompt):
    harness = make_harness(make_tiny_llama(tmp_path, num_hidden_layers=5))
    blocks = harness.executor._rank.runner.cache.blocks
    request = harness.request(random_prompt(20), 1)
    seen = []

    def on_layers(rank, start, end, event):
        written = [bool(blocks[request.block_ids[0], layer].any()) for layer in range(5)]
        seen.append((start, end, event.query(), written))

    harness.step([(request, 20)], layer_groups=2, on_layers=on_layers)
    assert seen == [
        (0, 2, True, [True, True, False, False, False]),
        (2, 5, True, [True, True, True, True, True]),
    ]


@pytest.mark.parametrize(("layers", "groups"), [(30, 4), (2, 4), (5, 1), (7, 7), (3, 0)])
def test_layer_ranges_cover_all_layers_once(layers, groups):
    ranges = layer_ranges(layers, groups)
    assert [layer for start, end in ranges for layer in range(start, end)] == list(range(layers))
    assert len(ranges) == max(1, min(layers, groups))
    assert max(end - start for start, end in ranges) - min(end - start for start, end in ranges) <= 1


def test_copied_blocks_continue_like_their_source(tiny_llama, make_harness, random_prompt):
    """Two choices share full blocks; the partial one is copied in the step in which they part."""
    harness = make_harness(tiny_llama)
    first = harness.request(random_prompt(20), 6)
    plan = StepPlan(0, [ScheduledRequest(first, 20, True, num_samples=3)])
    (sampled,) = run_step(harness.executor, plan, 1, None).sampled
    assert len(sampled.token_ids) == 3
    second = harness.request(random_prompt(20), 6)
    copies = [(first.block_ids[1], second.block_ids[1])]
    second.block_ids[0] = first.block_ids[0]
    for request, token in ((first, sampled.token_ids[0]), (second, 5)):
        request.num_computed_tokens, request.output_ids = 20, [token]
    plan = StepPlan(1, [ScheduledRequest(first, 1, True), ScheduledRequest(second, 1, True)], copies)
    for request, result in zip((first, second), run_step(harness.executor, plan, 1, None).sampled, strict=True):
        request.num_computed_tokens += 1
        request.output_ids += result.token_ids
    for request in (first, second):
        alone = make_harness(tiny_llama)
        again = alone.request(random_prompt(20), 6)
        again.output_ids = request.output_ids[:1]
        assert alone.generate(again) == harness.generate(request)


def test_a_plan_of_copies_alone_swaps_blocks(tiny_llama, make_harness):
    harness = make_harness(tiny_llama)
    blocks = harness.executor._rank.runner.cache.blocks
    blocks[1:4] = torch.arange(1.0, 4.0).view(3, 1, 1, 1, 1, 1)
    assert run_step(harness.executor, StepPlan(0, [], [(1, 2), (2, 1), (3, 7)]), 1, None).sampled == []
    assert [float(blocks[i].mean()) for i in (1, 2, 3, 7)] == [2.0, 1.0, 3.0, 3.0]


def test_prompt_logprobs_cover_the_prompt_whatever_the_chunks(tiny_llama, make_harness, reference, random_prompt):
    prompt = random_prompt(40)
    with torch.inference_mode():
        logprobs = reference(tiny_llama)(torch.tensor([prompt])).logits[0].log_softmax(-1)
    expected = [float(logprobs[i, prompt[i + 1]]) for i in range(39)]
    for chunk in (40, 39, 16, 7):
        harness = make_harness(tiny_llama)
        request, other = harness.request(prompt, 2, prompt_logprobs=1), harness.request(random_prompt(5), 2)
        found = []
        while len(request.output_ids) < 2:
            work = [(r, min(chunk, r.num_tokens - r.num_computed_tokens)) for r in (other, request)]
            _, sampled = harness.step(work)
            found += sampled.prompt_logprobs
        assert [entry.token_id for entry in found] == prompt[1:]
        torch.testing.assert_close([e.logprob for e in found], expected, rtol=1e-4, atol=1e-4)


def test_partial_chunks_sample_nothing_and_masks_follow_their_request(tiny_llama, make_harness, random_prompt):
    harness = make_harness(tiny_llama)
    partial, full = harness.request(random_prompt(30), 2), harness.request(random_prompt(6), 2)
    seen = []
    sample = harness.sampler.sample

    def spy(logits, scheduled, allowed):
        seen.append((logits.shape[0], [s.request for s in scheduled], list(allowed)))
        return sample(logits, scheduled, allowed)

    harness.sampler.sample = spy
    mask = torch.full((1, 10), -1, dtype=torch.int32)
    plan = StepPlan(0, [ScheduledRequest(partial, 10, False), ScheduledRequest(full, 6, True)], allowed={1: mask})
    results = run_step(harness.executor, plan, 1, None).sampled
    assert [len(result.token_ids) for result in results] == [0, 1]
    assert len(seen) == 1
    assert seen[0] == (1, [full], [mask])


def test_close_is_idempotent_and_final(tiny_llama, make_harness, random_prompt):
    harness = make_harness(tiny_llama)
    harness.executor.close()
    harness.executor.close()
    with pytest.raises(RuntimeError, match="closed"):
        harness.step([(harness.request(random_prompt(3), 1), 3)])


def test_sizes_that_do_not_fit_are_refused(tiny_llama):
    def build(**changes):
        arguments = {
            "dtype": "float32",
            "device": torch.device("cpu"),
            "block_size": 16,
            "allocate": lambda size, device: torch.zeros(size, dtype=torch.uint8),
            "make_sampler": lambda vocab_size, stop_ids, device: None,
            **changes,
        }
        return build_executor(tiny_llama, **arguments)

    block = 2 * 2 * 2 * 16 * 16 * 4
    built = build(kv_memory_bytes=10 * block + block // 2)
    assert (built.num_blocks, built.max_model_len) == (10, 9 * 16)
    assert build(num_blocks=64).max_model_len == 512
    assert build(num_blocks=64, max_model_len=100).max_model_len == 100
    with pytest.raises(DoesNotFit, match="over the model's limit of 512"):
        build(num_blocks=64, max_model_len=513)
    with pytest.raises(DoesNotFit, match=r"more than the 10 KV blocks \(144 tokens\)"):
        build(num_blocks=10, max_model_len=145)
    with pytest.raises(DoesNotFit, match="too few"):
        build(kv_memory_bytes=block)
    with pytest.raises(UnsupportedModel, match="dtype 'int8'"):
        build(num_blocks=4, dtype="int8")


def test_parallel_shards_tile_the_model():
    ranks = [ParallelContext(tp_rank=rank, tp_size=4) for rank in range(4)]
    assert [rank.shard(8, "heads") for rank in ranks] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert [rank.kv_heads(2) for rank in ranks] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    with pytest.raises(ValueError, match="heads \\(9\\) cannot be split"):
        ranks[0].shard(9, "heads")
    with pytest.raises(ValueError, match="3 KV heads"):
        ranks[0].kv_heads(3)
    stages = [replace(ParallelContext(), pp_rank=rank, pp_size=4) for rank in range(4)]
    assert [stage.layers(30) for stage in stages] == [(0, 8), (8, 16), (16, 23), (23, 30)]
