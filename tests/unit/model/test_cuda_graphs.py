"""Decode steps padded to captured sizes: same results, nothing written but the null block. Replays run eagerly here."""

from __future__ import annotations

import pytest
import torch


def record(calls):
    """A ``Capture`` that keeps what ran."""

    def capture(step):
        def replay():
            calls.append(step)
            return step()

        step()
        return replay

    return capture


@pytest.mark.parametrize(("family", "count"), [("llama", 1), ("llama", 3), ("gemma3", 5), ("qwen3-moe", 3)])
def test_padded_steps_equal_plain_ones_and_touch_only_the_null_block(
    tmp_path, make_tiny_model, make_harness, random_prompt, family, count
):
    folder = make_tiny_model(family, tmp_path / "model")
    harnesses = [make_harness(folder), make_harness(folder)]
    calls: list[object] = []
    runner = harnesses[1].executor._rank.runner
    runner.capture(record(calls), (1, 2, 4, 8), max_blocks=8)
    steps = []
    for harness in harnesses:
        requests = [harness.request(random_prompt(5 + 13 * i), 20) for i in range(count)]
        for request in requests:
            harness.step([(request, request.num_tokens)])
        cache = harness.executor._rank.runner.cache.blocks
        for request in requests:
            for block in request.block_ids[request.num_computed_tokens // 16 + 1 :]:
                cache[block] = float("nan")
        for _ in range(18):
            harness.step([(request, 1) for request in requests])
        steps.append((requests, cache, harness.sampler.calls))
    assert len(calls) == 18, "every decode step was replayed, no prompt was"
    (plain, plain_kv, plain_logits), (padded, padded_kv, padded_logits) = steps
    assert [r.output_ids for r in padded] == [r.output_ids for r in plain]
    for a, b in zip(plain_logits, padded_logits, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(padded_kv[1:], plain_kv[1:], rtol=1e-4, atol=1e-4, equal_nan=True)
    assert padded_kv[0].isfinite().all()
    assert plain_kv[0].eq(0).all()


def test_steps_that_do_not_fit_run_as_usual(tiny_llama, make_harness, random_prompt):
    harness = make_harness(tiny_llama)
    calls: list[object] = []
    harness.executor._rank.runner.capture(record(calls), (1, 2), max_blocks=2)
    requests = [harness.request(random_prompt(n), 5) for n in (30, 5, 6)]
    for request in requests:
        harness.step([(request, request.num_tokens)])
    harness.step([(request, 1) for request in requests])
    assert not calls, "three requests are beyond the largest size"
    harness.step([(requests[0], 1)])
    assert len(calls) == 1
    harness.step([(requests[0], 1), (requests[1], 1)])
    assert len(calls) == 1, "a third block is beyond max_blocks"
    alone = make_harness(tiny_llama)
    again = alone.request(random_prompt(30), 5)
    assert alone.generate(again)[:4] == requests[0].output_ids[:4]


def test_capturing_writes_only_the_null_block(tiny_llama, make_harness):
    harness = make_harness(tiny_llama, block_size=8)
    runner = harness.executor._rank.runner
    before = runner.cache.blocks.clone()
    runner.capture(record([]), (1, 4), max_blocks=3)
    assert torch.equal(runner.cache.blocks[1:].view(torch.int32), before[1:].view(torch.int32))
    assert runner.cache.blocks[0].any()
    assert runner.cache.blocks[0].isfinite().all()
