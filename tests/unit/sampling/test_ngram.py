import random

import numpy as np
import pytest

from twinpool.engine.ngram import NgramProposer, propose_ngram
from twinpool.engine.request import SamplingParams

from .helpers import make_request


def propose(tokens: list[int], min_n: int, max_n: int, k: int) -> list[int]:
    return propose_ngram(np.array(tokens, dtype=np.int32), min_n, max_n, k)


def slow(tokens: list[int], min_n: int, max_n: int, k: int) -> list[int]:
    for n in range(max_n, min_n - 1, -1):
        suffix = tokens[-n:]
        if len(suffix) < n:
            continue
        for start in range(len(tokens) - n):
            if tokens[start : start + n] == suffix:
                return tokens[start + n : start + n + k]
    return []


@pytest.mark.parametrize(
    ("tokens", "min_n", "max_n", "k", "expected"),
    [
        ([1, 2, 3, 4, 2, 3], 2, 3, 4, [4, 2, 3]),
        ([1, 2, 3, 4, 2, 3], 2, 3, 2, [4, 2]),
        ([1, 2, 3, 4, 5], 1, 3, 4, []),
        ([1, 2, 3, 1, 2, 4, 1, 2], 2, 2, 1, [3]),  # the earliest occurrence
        ([9, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3], 1, 3, 2, [8, 1]),  # the longest n
        ([5, 5, 5], 2, 2, 4, [5]),  # may overlap the suffix
        ([5, 5, 5, 5], 1, 2, 3, [5, 5]),
        ([7], 1, 3, 4, []),
        ([], 1, 3, 4, []),
        ([7, 7], 1, 3, 4, [7]),
        ([1, 2, 1], 2, 3, 4, []),
    ],
)
def test_vectors(tokens: list[int], min_n: int, max_n: int, k: int, expected: list[int]) -> None:
    assert propose(tokens, min_n, max_n, k) == expected
    assert slow(tokens, min_n, max_n, k) == expected


def test_against_plain_search() -> None:
    rng = random.Random(1)
    for _ in range(3000):
        tokens = rng.choices(range(rng.randint(1, 5)), k=rng.randint(0, 25))
        min_n = rng.randint(1, 3)
        arguments = (tokens, min_n, rng.randint(min_n, 5), rng.randint(1, 6))
        assert propose(*arguments) == slow(*arguments)


def test_context_grows_with_the_request() -> None:
    rng = random.Random(2)
    request = make_request(SamplingParams(), prompt=rng.choices(range(4), k=5))
    proposer = NgramProposer(1, 3, 4)
    for step in range(300):
        expected = slow([*request.prompt_ids, *request.output_ids], 1, 3, 4)
        assert proposer.propose(request) == expected
        request.output_ids += rng.choices(range(4), k=step % 4)


def test_settings_are_checked() -> None:
    for arguments in ((0, 3, 4), (3, 2, 4), (1, 2, 0)):
        with pytest.raises(ValueError, match="need 1 <= min_n"):
            NgramProposer(*arguments)
