"""Rows of block tables that outlive a step, against tables built anew, under random lives of requests."""

from __future__ import annotations

import random

import numpy as np
import pytest

from twinpool.engine.request import Request, RequestState, SamplingParams, StopParams
from twinpool.engine.table_rows import ShortTable, TableRows


def make(number: int, block_ids: list[int]) -> Request:
    return Request(number, [1], SamplingParams(), StopParams(1), block_ids=block_ids)


@pytest.mark.parametrize("seed", range(5))
def test_rows_are_what_the_requests_say(seed: int) -> None:
    rng = random.Random(seed)
    rows, live, number = TableRows(10_000), [], 0
    for _ in range(400):
        if rng.random() < 0.5 or not live:
            number += 1
            live.append(make(number, [rng.randrange(1, 10_000) for _ in range(rng.randrange(1, 30))]))
        for request in live:
            if rng.random() < 0.2:
                request.block_ids += [rng.randrange(1, 10_000) for _ in range(rng.randrange(4))]
            elif rng.random() < 0.05:  # preempted, admitted again
                request.block_ids = [rng.randrange(1, 10_000) for _ in range(rng.randrange(1, 40))]
        if rng.random() < 0.4 and live:
            done = live.pop(rng.randrange(len(live)))
            done.state = RequestState.FINISHED
        batch = rng.sample(live, rng.randrange(len(live) + 1))
        counts = np.array([rng.randrange(1, len(request.block_ids) + 1) for request in batch], np.int64)
        found = rows.gather([rows.row(request) for request in batch], counts)
        for row, request, count in zip(found.tolist(), batch, counts.tolist(), strict=True):
            assert row == request.block_ids[:count] + [0] * (len(row) - count)
        assert len(rows) <= len(live) + 33
    assert number > 100


def test_a_row_that_is_too_short_is_named() -> None:
    rows = TableRows(10)
    picked = [rows.row(make(1, [1, 2])), rows.row(make(2, [3]))]
    with pytest.raises(ShortTable, match="needs 2 blocks for its tokens and has 1") as error:
        rows.gather(picked, np.array([2, 2]))
    assert error.value.index == 1
