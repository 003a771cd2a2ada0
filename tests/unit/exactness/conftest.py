"""Pools of tiny models, shared by all tests here; engines over them are made per test."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from options import BLOCK, LENGTHS, LONG_LENGTHS, Truth, asks_of, stop_ask
from pair import Answer, Grammars, Pool, pair

MakePool = Callable[[int, int, str], Pool]


@pytest.fixture(scope="session")
def pool(tiny_llama: Path) -> Iterator[MakePool]:
    """A function (block size, blocks, name) -> Pool; the same arguments give the same pool."""
    pools: dict[tuple[int, int, str], Pool] = {}

    def get(block_size: int, num_blocks: int, name: str) -> Pool:
        key = (block_size, num_blocks, name)
        if key not in pools:
            pools[key] = Pool.load(tiny_llama, block_size, num_blocks)
        return pools[key]

    yield get
    for item in pools.values():
        item.close()


@pytest.fixture(scope="session")
def grammars(tiny_llama: Path, pool: MakePool) -> Iterator[Mapping[str, Grammars]]:
    """Constraints for both engines of a pair."""
    config = pool(4, 400, "decode").built.config
    tokenizer = tiny_llama / "tokenizer.json"
    both = {role: Grammars(tokenizer, config.vocab_size, config.eos_ids) for role in ("prefill", "decode")}
    yield both
    for item in both.values():
        assert len(item) == 0, "a matcher was not released"
        item.close()


def reference(pool: MakePool, grammars: Mapping[str, Grammars], lengths: Sequence[int]) -> Truth:
    """One engine, one request at a time, no prefix cache, no chunks."""
    found: dict[tuple[str, int], list[Answer]] = {}
    for length in lengths:
        with pair(pool(BLOCK, 400, "decode"), grammars=grammars, caching=False) as alone:
            for name, ask in asks_of(length).items():
                [found[name, length]] = alone.serve([ask])
            greedy = found["greedy", length][0].tokens
            [found["stop ids", length]] = alone.serve([stop_ask(length, greedy)])
    return found


@pytest.fixture(scope="session")
def truth(pool: MakePool, grammars: Mapping[str, Grammars]) -> Truth:
    """The reference around the edges of blocks of 2 and 4 tokens."""
    return reference(pool, grammars, LENGTHS)


@pytest.fixture(scope="session")
def long_truth(pool: MakePool, grammars: Mapping[str, Grammars]) -> Truth:
    """The reference around the edges of blocks of 16 tokens."""
    return reference(pool, grammars, LONG_LENGTHS)
