from collections import Counter

import pytest

from twinpool.engine.block_pool import BlockPool, IntegrityError
from twinpool.engine.block_tables import BlockTables
from twinpool.engine.request import Request, SamplingParams, StopParams


def request(tokens, attempt_id=1, salt=""):
    return Request(attempt_id, tokens, SamplingParams(), StopParams(8), cache_salt=salt)


def admit(tables, r):
    hits = tables.match(r, (r.num_tokens - 1) // tables.block_size)
    assert tables.can_allocate(r, r.num_tokens, hits)
    tables.admit(r, r.num_tokens, hits)
    r.num_computed_tokens = r.num_tokens
    tables.commit(r)
    return hits


def test_doc_walk_through_of_reuse_and_eviction_order():
    # vLLM's prefix caching walk-through; it has no null block, so ids are one higher here.
    tables = BlockTables(BlockPool(11), 4, "r", caching=True)
    r0 = request(list(range(15)))
    admit(tables, r0)
    assert r0.block_ids == [1, 2, 3, 4]
    r0.output_ids += [500, 501]
    tables.grow(r0, 17)
    r0.num_computed_tokens = 17
    tables.commit(r0)
    assert r0.block_ids == [1, 2, 3, 4, 5]
    r1 = request([*range(10), 90, 91, 92, 93], 2)
    assert admit(tables, r1) == [1, 2]
    assert r1.block_ids == [1, 2, 6, 7]
    tables.pool.free(r0.block_ids)
    tables.pool.free(r1.block_ids)
    assert tables.pool.free_ids() == [8, 9, 10, 5, 4, 3, 7, 6, 2, 1]
    r2 = request([*range(12), *range(200, 217)], 3)
    assert admit(tables, r2) == [1, 2, 3]
    assert r2.block_ids == [1, 2, 3, 8, 9, 10, 5, 4]
    tables.pool.check_integrity(Counter(r2.block_ids))


def test_second_request_reuses_two_blocks_and_computes_three_tokens():
    # Fig 8: the first request took blocks 1-5 (4.25 full); the second shares 8 tokens.
    tables = BlockTables(BlockPool(20), 4, "r", caching=True)
    r0 = request(list(range(17)))
    admit(tables, r0)
    assert r0.block_ids == [1, 2, 3, 4, 5]
    r1 = request([*range(8), 70, 71, 72], 2)
    hits = tables.match(r1, (r1.num_tokens - 1) // 4)
    tables.admit(r1, r1.num_tokens, hits)
    assert r1.block_ids == [1, 2, 6]
    assert r1.num_tokens - r1.num_computed_tokens == 3


@pytest.mark.parametrize(("length", "local", "remote"), [(3, 0, 0), (4, 0, 1), (5, 1, 1), (8, 1, 2), (9, 2, 2)])
def test_hit_lengths_around_block_edges(length, local, remote):
    tables = BlockTables(BlockPool(20), 4, "r", caching=True)
    admit(tables, request(list(range(12))))
    again = request(list(range(length)), 2)
    assert len(tables.match(again, (length - 1) // 4)) == local
    assert len(tables.match(again, length // 4)) == remote


def test_salts_and_disabled_caching_do_not_share():
    tables = BlockTables(BlockPool(20), 4, "r", caching=True)
    admit(tables, request(list(range(12)), salt="a"))
    assert tables.match(request(list(range(12)), 2, salt="b"), 3) == []
    off = BlockTables(BlockPool(20), 4, "r", caching=False)
    admit(off, request(list(range(12))))
    assert off.match(request(list(range(12)), 2), 3) == []
    assert off.pool.num_cached == 0


def test_hits_that_are_free_count_as_taken():
    tables = BlockTables(BlockPool(5), 4, "r", caching=True)
    r0 = request(list(range(16)))
    admit(tables, r0)
    tables.pool.free(r0.block_ids)
    r1 = request([*range(12), 90, 91, 92, 93, 94], 2)
    hits = tables.match(r1, 4)
    assert len(hits) == 3
    assert not tables.can_allocate(r1, 17, hits)  # 3 revived + 2 new > 4 free
    assert tables.can_allocate(r1, 16, hits)
    assert not tables.can_allocate(r1, 16, hits, headroom=1)
    assert tables.pool.num_free == 4


def test_events_are_net_and_reset_keeps_used_blocks():
    pool = BlockPool(4)
    a, b, c = pool.allocate(3)
    pool.cache(a, b"a")
    pool.cache(b, b"b")
    pool.cache(c, b"a")  # the same content twice: the first keeps the name
    events = pool.take_events()
    assert (events.stored, events.removed, events.reset) == ([b"a", b"b"], [], False)
    pool.free([b, c])
    assert pool.free_ids() == [c, b]
    assert pool.lookup([b"b"], 1) == [b]
    pool.allocate(2)
    assert pool.take_events().removed == [b"b"]
    pool.cache(c, b"c")
    pool.free([c])
    pool.allocate(1)
    events = pool.take_events()
    assert (events.stored, events.removed) == ([], [])
    pool.free([b])
    pool.reset_cache()
    events = pool.take_events()
    assert (events.reset, events.stored, events.removed) == (True, [b"a"], [])


def test_misuse_is_refused_and_integrity_sees_a_leak():
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    with pytest.raises(IntegrityError):
        pool.allocate(2)
    pool.check_integrity(Counter(blocks))
    with pytest.raises(IntegrityError, match="references"):
        pool.check_integrity(Counter(blocks[:1]))
    pool.free(blocks)
    with pytest.raises(IntegrityError):
        pool.free(blocks[:1])
    with pytest.raises(IntegrityError):
        pool.free([0])
    pool.check_integrity({})
    with pytest.raises(ValueError, match="2 blocks"):
        BlockPool(1)
