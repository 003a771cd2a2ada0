from __future__ import annotations

import pytest
import torch

from twinpool.engine.batch import BatchBuilder, prompt_rows
from twinpool.engine.plan import ScheduledRequest
from twinpool.engine.request import Request, SamplingParams, StopParams

CPU = torch.device("cpu")


def make(prompt: list[int], blocks: list[int], prompt_logprobs: int | None = None) -> Request:
    request = Request(7, prompt, SamplingParams(prompt_logprobs=prompt_logprobs), StopParams(8))
    request.block_ids = blocks
    return request


def build(scheduled, block_size=4, num_blocks=32, vocab_size=100):
    builder = BatchBuilder(block_size=block_size, num_blocks=num_blocks, vocab_size=vocab_size)
    return builder.build(scheduled).on(CPU)


def test_golden_vector_of_three_prompts_and_their_first_decode():
    requests = [
        make([1, 2, 3, 4, 5], [1, 2]),
        make([1, 6, 5, 7, 8, 9, 10], [3, 4]),
        make([1, 12, 13], [5]),
    ]
    batch = build([ScheduledRequest(r, r.num_tokens, True) for r in requests])
    assert batch.input_ids.tolist() == [1, 2, 3, 4, 5, 1, 6, 5, 7, 8, 9, 10, 1, 12, 13]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6, 0, 1, 2]
    slots = [4, 5, 6, 7, 8, 12, 13, 14, 15, 16, 17, 18, 20, 21, 22]
    assert batch.attention.slot_mapping.tolist() == slots
    assert batch.attention.query_start_loc.tolist() == [0, 5, 12, 15]
    assert batch.attention.seq_lens.tolist() == [5, 7, 3]
    assert batch.attention.block_tables.tolist() == [[1, 2], [3, 4], [5, 0]]
    assert batch.sample_rows.tolist() == [4, 11, 14]
    assert sorted(batch.new_blocks.tolist()) == [1, 2, 3, 4, 5]

    for request, token in zip(requests, (20, 21, 22), strict=True):
        request.num_computed_tokens = request.num_tokens
        request.output_ids = [token]
    batch = build([ScheduledRequest(r, 1, True) for r in requests])
    assert batch.input_ids.tolist() == [20, 21, 22]
    assert batch.attention.slot_mapping.tolist() == [9, 19, 23]
    assert batch.attention.query_start_loc.tolist() == [0, 1, 2, 3]
    assert batch.attention.seq_lens.tolist() == [6, 8, 4]
    assert batch.sample_rows.tolist() == [0, 1, 2]
    assert batch.new_blocks.tolist() == []


def test_drafts_follow_the_last_token_and_are_all_sampled():
    request = make([1, 2, 3], [9, 4])
    request.output_ids = [5]
    request.num_computed_tokens = 3
    request.draft_ids = [6, 7]
    chunk = make([8] * 6, [2, 3])
    batch = build([ScheduledRequest(chunk, 4, False), ScheduledRequest(request, 3, True, num_drafts=2)])
    assert batch.input_ids.tolist() == [8, 8, 8, 8, 5, 6, 7]
    assert batch.positions.tolist() == [0, 1, 2, 3, 3, 4, 5]
    assert batch.attention.slot_mapping.tolist() == [8, 9, 10, 11, 39, 16, 17]
    assert batch.sample_rows.tolist() == [4, 5, 6]
    assert batch.new_blocks.tolist() == [2, 4]


def test_slots_do_not_overflow_32_bits():
    request = make([1], [2**31 + 5])
    batch = build([ScheduledRequest(request, 1, True)], num_blocks=2**40)
    assert batch.attention.slot_mapping.tolist() == [4 * (2**31 + 5)]


def test_prompt_rows_stop_at_the_last_prompt_token():
    wanted, other = make([10, 11, 12, 13, 14], [1, 2], prompt_logprobs=2), make([1, 2], [3])
    (rows,) = prompt_rows([ScheduledRequest(other, 2, True), ScheduledRequest(wanted, 3, False)])
    assert (rows.index, rows.start, rows.end, list(rows.token_ids)) == (1, 2, 5, [11, 12, 13])
    wanted.num_computed_tokens = 3
    (rows,) = prompt_rows([ScheduledRequest(wanted, 2, True)])
    assert (rows.start, rows.end, list(rows.token_ids)) == (0, 1, [14])
    wanted.num_computed_tokens, wanted.output_ids = 5, [3]
    assert prompt_rows([ScheduledRequest(wanted, 1, True)]) == []


@pytest.mark.parametrize(
    ("prompt", "blocks", "match"),
    [
        ([1] * 5, [1], "needs 2 blocks"),
        ([1] * 5, [1, 32], "block id outside"),
        ([1] * 5, [0, 1], "block id outside"),
        ([1, 100], [1], "token id 100"),
        ([1, -1], [1], "token id -1"),
    ],
)
def test_nothing_outside_the_tables_is_ever_addressed(prompt, blocks, match):
    with pytest.raises(ValueError, match=match):
        build([ScheduledRequest(make(prompt, blocks), len(prompt), True)])


def test_a_plan_beyond_the_known_tokens_is_refused():
    with pytest.raises(ValueError, match="schedules 4 tokens"):
        build([ScheduledRequest(make([1, 2, 3], [1]), 4, True)])
