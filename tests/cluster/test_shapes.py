"""Prefill and decode workers of any tensor and pipeline parallel shape say the same, token for token.

Ranks are real processes that talk over gloo, and every rank reads KV for itself; engines and tables are stepped by the
test, so that a pair of shapes costs no deployment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pair import Answer, Ask, Pool, pair
from tiny_models import FAMILIES, write_tiny_llama, write_tiny_model
from twinpool.engine.request import SamplingParams, StopParams

SHAPES = {"TP1": (1, 1), "TP2": (2, 1), "TP4": (4, 1), "PP2": (1, 2), "PP2xTP2": (2, 2)}
BLOCK = 8
NUM_BLOCKS = 80
ALL = [(heads, p, d) for heads in (2, 4) for p in SHAPES for d in SHAPES]
# The diagonal, and the corners between cuts of heads and of layers; with 2 KV heads TP4 holds each twice.
FAST = {
    *((2, shape, shape) for shape in SHAPES),
    (2, "TP1", "TP2"),
    (2, "TP2", "TP1"),
    (2, "TP1", "TP4"),
    (2, "TP4", "TP1"),
    (2, "TP4", "PP2"),
    (2, "PP2", "TP2"),
    (2, "PP2xTP2", "TP4"),
    (2, "TP4", "PP2xTP2"),
}
MakePool = Callable[[int, str, str], Pool]


def asks() -> list[Ask]:
    """Greedy requests around block edges, a long one, several seeded choices, and prompt log probabilities."""
    stop = StopParams(6, ignore_eos=True)
    greedy = [
        Ask([(7 * n + 3 * i) % 250 + 1 for i in range(n)], stop=stop, salt=f"{n}") for n in (1, 7, 8, 9, 16, 40, 70)
    ]
    seeded = Ask(list(range(3, 30)), SamplingParams(temperature=0.7, seed=11, n=3), stop)
    scored = Ask(list(range(40, 62)), SamplingParams(temperature=0, logprobs=2, prompt_logprobs=1), stop)
    return [*greedy, seeded, scored]


@pytest.fixture(scope="module")
def make_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakePool]:
    """A function (KV heads, shape, role) -> Pool; pools of one number of heads live at a time."""
    pools: dict[tuple[int, str, str], Pool] = {}
    folders: dict[int, Path] = {}

    def close() -> None:
        for pool in pools.values():
            pool.close()
        pools.clear()

    def get(heads: int, shape: str, role: str) -> Pool:
        if heads not in folders:
            close()
            folder = tmp_path_factory.mktemp(f"heads-{heads}")
            folders[heads] = write_tiny_llama(folder, num_hidden_layers=3, num_key_value_heads=heads)
        key = (heads, shape, role)
        if key not in pools:
            tp_size, pp_size = SHAPES[shape]
            pools[key] = Pool.load(folders[heads], BLOCK, NUM_BLOCKS, tp_size, pp_size)
        return pools[key]

    yield get
    close()


@pytest.fixture(scope="module")
def truth(make_pool: MakePool) -> Callable[[int], list[list[Answer]]]:
    """What one engine on one rank says, by KV heads."""
    known: dict[int, list[list[Answer]]] = {}

    def get(heads: int) -> list[list[Answer]]:
        if heads not in known:
            with pair(make_pool(heads, "TP1", "decode"), caching=False) as alone:
                known[heads] = [alone.serve([ask])[0] for ask in asks()]
        return known[heads]

    return get


def check(found: list[list[Answer]], expected: list[list[Answer]]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert [answer.said for answer in mine] == [answer.said for answer in theirs]
        for one, other in zip(mine, theirs, strict=True):
            for given, wanted in ((one.logprobs, other.logprobs), (one.prompt_logprobs, other.prompt_logprobs)):
                assert [entry.logprob for entry in given] == pytest.approx([e.logprob for e in wanted], abs=1e-3)


def parameters() -> list[object]:
    return [
        pytest.param(*case, id="-".join(map(str, case)), marks=[] if case in FAST else pytest.mark.slow) for case in ALL
    ]


@pytest.mark.parametrize(("heads", "prefill", "decode"), parameters())
def test_any_shape_to_any_shape(
    make_pool: MakePool, truth: Callable[[int], list[list[Answer]]], heads: int, prefill: str, decode: str
) -> None:
    expected = truth(heads)
    pools = make_pool(heads, decode, "decode"), make_pool(heads, prefill, "prefill")
    with pair(*pools, chunk=16, caching=True) as both:
        check(both.serve(asks()), expected)
        check(both.serve(asks()), expected)  # with hits in both caches
        moved = [event.transfer_bytes for event in both.events if hasattr(event, "transfer_bytes")]
        assert sum(moved) > 0


@pytest.mark.parametrize("shape", [pytest.param(s, marks=[] if s == "PP2xTP2" else pytest.mark.slow) for s in SHAPES])
def test_a_decode_worker_alone(make_pool: MakePool, truth: Callable[[int], list[list[Answer]]], shape: str) -> None:
    with pair(make_pool(2, shape, "decode"), chunk=16, caching=False) as alone:
        check(alone.serve(asks()), truth(2))


def marked(family: str) -> object:
    """Fast are tied embeddings on two stages with norms around sub-layers, and experts."""
    return pytest.param(family, marks=[] if family in ("gemma3", "qwen3-moe") else pytest.mark.slow)


@pytest.mark.parametrize("family", [marked(family) for family in FAMILIES])
def test_every_family_on_four_ranks(tmp_path: Path, family: str) -> None:
    folder = write_tiny_model(family, tmp_path)
    found = []
    for shape in ("TP1", "PP2xTP2"):
        pool = Pool.load(folder, BLOCK, NUM_BLOCKS, *SHAPES[shape])
        try:
            with pair(pool, chunk=16, caching=False) as alone:
                found.append(alone.serve(asks()))
        finally:
            pool.close()
    check(found[1], found[0])
