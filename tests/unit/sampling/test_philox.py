import numpy as np
import pytest

from twinpool.engine.philox import philox4x32, uniforms

# Random123's kat_vectors for philox4x32 with 10 rounds: counter, key, result.
KNOWN_ANSWERS = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_known_answers(counter: list[int], key: list[int], result: list[int]) -> None:
    out = philox4x32(np.array(counter, np.uint32)[:, None], np.array(key, np.uint32)[:, None])
    assert out[:, 0].tolist() == result


def test_known_answers_hold_in_a_vector() -> None:
    counters = np.array([c for c, _, _ in KNOWN_ANSWERS], np.uint32).T
    keys = np.array([k for _, k, _ in KNOWN_ANSWERS], np.uint32).T
    assert philox4x32(counters, keys).T.tolist() == [r for _, _, r in KNOWN_ANSWERS]


def keyed(seed: int, index: int, choice: int, stream: int = 0) -> float:
    return float(uniforms(np.array([seed], np.uint64), np.array([index]), np.array([choice]), stream)[0])


def test_first_uniform_of_seed_zero() -> None:
    assert keyed(0, 0, 0) == ((0x6627E8D5 << 32 | 0xE169C58D) >> 11) / 2**53


def test_each_part_of_the_key_matters() -> None:
    keys = [
        (0, 0, 0, 0),
        (1, 0, 0, 0),
        (1 << 32, 0, 0, 0),
        (0, 1, 0, 0),
        (0, 0, 1, 0),
        (0, 0, 0, 1),
        (2**64 - 1, 0, 0, 0),
    ]
    assert len({keyed(*key) for key in keys}) == len(keys)


def test_a_number_does_not_depend_on_the_others() -> None:
    seeds = np.array([5, 6, 7], np.uint64)
    together = uniforms(seeds, np.array([1, 2, 3]), np.array([0, 1, 2]))
    assert together.tolist() == [keyed(5, 1, 0), keyed(6, 2, 1), keyed(7, 3, 2)]


def test_uniform_over_seeds_and_indices() -> None:
    n = 40_000
    for seeds, indices in [(np.arange(n), np.zeros(n, np.int64)), (np.full(n, 9), np.arange(n))]:
        u = uniforms(seeds.astype(np.uint64), indices, np.zeros(n, np.int64))
        assert u.min() >= 0
        assert u.max() < 1
        counts = np.histogram(u, bins=100, range=(0, 1))[0]
        chi_square = ((counts - n / 100) ** 2 / (n / 100)).sum()
        assert chi_square < 149  # 99.9 % quantile of 99 degrees of freedom is 148.2
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.02
