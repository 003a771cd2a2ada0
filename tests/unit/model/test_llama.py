"""The engine's Llama against transformers: logits, greedy tokens, chunking, batching, block placement."""

from __future__ import annotations

import pytest
import torch
from steps import run_step

BLOCK = 16
CONFIGS = {
    "grouped": {},
    "smollm": {
        "hidden_size": 72,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "num_hidden_layers": 3,
        "tie_word_embeddings": True,
        "rope_theta": 100000,
    },
    "multi_head_biased": {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True, "head_dim": 32},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "dynamic": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "llama3": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "yarn": {
        "rope_scaling": None,
        "rope_theta": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 5000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
}


def logits_of(model, tokens):
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_greedy_tokens_equal_transformers(
    name, tmp_path, make_tiny_llama, make_harness, reference, reference_greedy, random_prompt
):
    folder = make_tiny_llama(tmp_path, **CONFIGS[name])
    harness, model = make_harness(folder), reference(folder)
    prompt = random_prompt(2 * BLOCK + 3)
    request = harness.request(prompt, 8)
    assert harness.generate(request) == reference_greedy(model, prompt, 8)
    expected = logits_of(model, prompt + request.output_ids)
    for index, logits in enumerate(harness.sampler.calls):
        torch.testing.assert_close(logits[0], expected[len(prompt) - 1 + index], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk", [1 << 30, BLOCK, 5, 1])
def test_every_prompt_length_around_blocks(chunk, tiny_llama, make_harness, reference, reference_greedy, random_prompt):
    harness, model = make_harness(tiny_llama), reference(tiny_llama)
    lengths = range(1, 3 * BLOCK + 2) if chunk != 1 else (1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 1)
    for length in lengths:
        prompt = random_prompt(length)
        request = harness.request(prompt, 3)
        assert harness.generate(request, chunk) == reference_greedy(model, prompt, 3), f"length {length}"
        harness.release(request)


def test_mixed_batches_of_prefill_and_decode(tiny_llama, make_harness, reference, reference_greedy, random_prompt):
    """Requests join one step after another, in chunks of 7; decoding ones stand between prefilling ones."""
    harness, model = make_harness(tiny_llama, num_blocks=128), reference(tiny_llama)
    lengths = (1, 40, 16, 33, 5, 100, 17, 2)
    requests = [harness.request(random_prompt(length), 12) for length in lengths]
    step = 0
    while any(len(r.output_ids) < 12 for r in requests):
        step += 1
        running = [r for r in requests[:step] if len(r.output_ids) < 12]
        if step % 2:
            running.reverse()
        harness.step([(r, min(7, r.num_tokens - r.num_computed_tokens)) for r in running])
    for request in requests:
        assert request.output_ids == reference_greedy(model, request.prompt_ids, 12)


def test_block_placement_changes_no_logit(tiny_llama, make_harness, random_prompt):
    straight, shuffled = make_harness(tiny_llama), make_harness(tiny_llama)
    shuffled.free.reverse()
    order = torch.randperm(len(shuffled.free), generator=torch.Generator().manual_seed(0)).tolist()
    shuffled.free = [shuffled.free[i] for i in order]
    for harness in (straight, shuffled):
        harness.generate(harness.request(random_prompt(45), 6), chunk=20)
    for left, right in zip(straight.sampler.calls, shuffled.sampler.calls, strict=True):
        assert torch.equal(left, right)


def test_reused_blocks_show_nothing_of_their_past(tiny_llama, make_harness, random_prompt):
    harness = make_harness(tiny_llama)
    fresh = harness.generate(harness.request(random_prompt(21), 8))
    first = harness.request(random_prompt(50), 8)
    harness.generate(first)
    harness.executor._rank.runner.cache.blocks[first.block_ids] = float("nan")
    harness.free = [*first.block_ids]
    assert harness.generate(harness.request(random_prompt(21), 8)) == fresh
    assert all(logits.isfinite().all() for logits in harness.sampler.calls)


def test_drafts_are_verified_in_one_step(tiny_llama, make_harness, random_prompt):
    prompt = random_prompt(30)
    harness = make_harness(tiny_llama)
    truth = list(harness.generate(harness.request(prompt, 8)))
    from twinpool.engine.plan import ScheduledRequest, StepPlan

    for wrong in range(4):
        request = harness.request(prompt, 8)
        harness.step([(request, len(prompt))])
        drafts = truth[1:4]
        if wrong < 3:
            drafts[wrong] = (drafts[wrong] + 1) % 290
        request.draft_ids = drafts
        plan = StepPlan(1, [ScheduledRequest(request, 4, True, num_drafts=3)])
        (sampled,) = run_step(harness.executor, plan, 1, None).sampled
        assert sampled.token_ids == truth[1 : 2 + wrong]
        request.output_ids += sampled.token_ids
        request.draft_ids = []
        request.num_computed_tokens += len(sampled.token_ids)
        assert harness.generate(request) == truth
        harness.release(request)


def test_bfloat16_stays_near_float32(tmp_path, make_tiny_llama, make_harness, random_prompt):
    folder = make_tiny_llama(tmp_path, torch_dtype="bfloat16")
    exact, rounded = make_harness(folder), make_harness(folder, dtype="auto")
    assert rounded.built.layout.dtype == "bfloat16"
    for harness in (exact, rounded):
        request = harness.request(random_prompt(40), 1)
        harness.step([(request, 25)])
        harness.step([(request, 15)])
    left, right = exact.sampler.calls[0][0], rounded.sampler.calls[0][0]
    assert right.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(left, right, 0) > 0.995
    assert (left - right).abs().max() < 0.25 * left.std()
