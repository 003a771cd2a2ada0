"""What the router believes of workers' prefix caches."""

from __future__ import annotations

import random

from twinpool.block_hash import chain_hashes, chain_root, short_name
from twinpool.router.messages import WorkerInfo
from twinpool.router.prefix_index import PrefixIndex
from twinpool.router.prompt_blocks import PromptBlocks

NAMES = list(range(100, 120))


def test_events_and_resets() -> None:
    index = PrefixIndex(100)
    assert index.matched(NAMES, 0) == 0
    index.apply(False, NAMES[:8], [])
    assert index.matched(NAMES, 0) == 8
    index.apply(False, [], NAMES[4:8])
    assert index.matched(NAMES, 0) == 4
    index.apply(True, NAMES[:2], [])
    assert index.matched(NAMES, 0) == 2
    index.apply(True, [], [])
    assert index.matched(NAMES, 0) == index.num_known == 0


def test_requests_on_their_way_count_until_they_expire_or_are_confirmed() -> None:
    index = PrefixIndex(100)
    index.expect(NAMES, 5.0)
    assert index.matched(NAMES, 0) == 0  # a worker that never stored anything may not cache at all
    index.apply(False, [1], [])
    index.expect(NAMES, 5.0)
    assert index.matched(NAMES, 4.9) == 20
    index.apply(False, NAMES[:10], [])
    assert index.matched(NAMES, 5.1) == 10
    index.apply(False, [], NAMES[5:10])
    assert index.matched(NAMES, 5.1) == 5


def test_memory_is_bounded_and_the_oldest_go() -> None:
    index = PrefixIndex(50)
    index.apply(False, range(1000), [])
    index.expect(range(1000, 2000), 9.0)
    assert index.num_known == 50
    assert index.matched(range(950, 1000), 0) == 50
    assert index.matched(range(1950, 2000), 0) == 50
    assert index.matched([0], 0) == index.matched([1000], 0) == 0


def test_the_search_finds_the_edge_wherever_it_is() -> None:
    for held in range(len(NAMES) + 1):
        index = PrefixIndex(100)
        index.apply(False, NAMES[:held], [])
        assert index.matched(NAMES, 0) == held


def test_names_are_those_of_the_workers() -> None:
    draw = random.Random(1)
    tokens = [draw.randrange(50_000) for _ in range(70)]
    info = WorkerInfo("w", 1, 1, "prefill", "m", "rev", "l", "l", 16, 9, 99, 9, "", "", 9)
    expected = [short_name(item) for item in chain_hashes(chain_root("rev", "", "salt"), tokens, 16)]
    blocks = PromptBlocks(tokens, "salt")
    assert blocks.of(info) == expected
    assert len(expected) == 4
    assert PromptBlocks(tokens, "").of(info)[0] != expected[0]
