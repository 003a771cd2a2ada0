import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twinpool.kv_transfer.block_table import BlockTable
from twinpool.kv_transfer.connectors.base import check_table
from twinpool.kv_transfer.copy_table import CopyRange, CopyTable
from twinpool.kv_transfer.layout import KVLayout, RankLayout
from twinpool.kv_transfer.read_planner import FEW_BLOCKS, ReadPlanner, shared_layers

NUM_BLOCKS = 7


def plan_reads(
    source: RankLayout, target: RankLayout, source_blocks: list[int], target_blocks: list[int], start: int, end: int
) -> CopyTable:
    return ReadPlanner(source, target).plan(source_blocks, target_blocks, start, end)


def specified(
    source: RankLayout, target: RankLayout, source_blocks: list[int], target_blocks: list[int], start: int, end: int
) -> list[CopyRange]:
    """Every run of every head, layer and half, one by one; then what touches at both ends becomes one."""
    ranges: list[CopyRange] = []
    for source_block, target_block in sorted(zip(source_blocks, target_blocks, strict=True)):
        for layer, half, head in itertools.product(
            range(max(source.layer_start, target.layer_start, start), min(source.layer_end, target.layer_end, end)),
            (0, 1),
            range(max(source.head_start, target.head_start), min(source.head_end, target.head_end)),
        ):
            at_source, at_target = (
                block * rank.block_bytes
                + (layer - rank.layer_start) * rank.layer_bytes
                + (half * rank.num_heads + head - rank.head_start) * rank.head_bytes
                for rank, block in ((source, source_block), (target, target_block))
            )
            item = CopyRange(at_source, at_target, source.head_bytes)
            last = ranges[-1] if ranges else None
            if last is not None and (last.source + last.length, last.target + last.length) == item[:2]:
                ranges[-1] = last._replace(length=last.length + item.length)
            else:
                ranges.append(item)
    return ranges


TINY = KVLayout(num_layers=8, num_kv_heads=4, head_dim=2, block_size=2, dtype="bfloat16")


def shards(tp: int, pp: int) -> list[RankLayout]:
    layers, heads = 8 // pp, max(1, 4 // tp)
    return [
        RankLayout(TINY, stage * layers, (stage + 1) * layers, 4 * rank // tp, 4 * rank // tp + heads)
        for stage in range(pp)
        for rank in range(tp)
    ]


SHAPES = list(itertools.product((1, 2, 4, 8), (1, 2, 4)))
BLOCKS = {
    "none": ([], []),
    "one": ([5], [9]),
    "upwards": ([1, 2, 3, 4], [6, 7, 8, 9]),
    "downwards": ([4, 3, 2, 1], [9, 8, 7, 6]),
    "two runs": ([7, 8, 1, 2, 3], [1, 2, 20, 21, 22]),
    "one side": ([1, 2, 3], [5, 7, 9]),
    "crossed": ([1, 2, 3], [9, 8, 7]),
    "many, apart": (list(range(1, 401, 2)), list(range(400, 0, -2))),
    "many, some runs": ([i + i // 5 for i in range(200)], [i + i // 7 for i in range(200)]),
}


@pytest.mark.parametrize("blocks", list(BLOCKS))
@pytest.mark.parametrize("layers", [(0, 8), (0, 2), (2, 4), (3, 7), (5, 5)], ids=str)
def test_plans_of_all_shapes_are_as_specified(layers: tuple[int, int], blocks: str) -> None:
    for source_shape, target_shape in itertools.product(SHAPES, SHAPES):
        for source, target in ((shards(*source_shape)[0], shards(*target_shape)[-1]), (shards(*source_shape)[-1],) * 2):
            expected = specified(source, target, *BLOCKS[blocks], *layers)
            table = plan_reads(source, target, *BLOCKS[blocks], *layers)
            assert [*table] == expected
            assert table.num_bytes == sum(item.length for item in expected)


@pytest.mark.parametrize("count", [1, FEW_BLOCKS, FEW_BLOCKS + 1])
def test_whole_blocks_that_do_not_merge_keep_their_ids(count: int) -> None:
    source_blocks, target_blocks = list(range(0, 2 * count, 2)), list(range(2 * count, 0, -2))
    table = plan_reads(WHOLE, WHOLE, source_blocks[::-1], target_blocks[::-1], 0, 6)
    assert isinstance(table, BlockTable)
    assert (table.source, table.target) == (source_blocks, target_blocks)
    assert not isinstance(plan_reads(WHOLE, WHOLE, source_blocks, target_blocks, 0, 5), BlockTable)


@st.composite
def part(draw: st.DrawFn, layout: KVLayout) -> RankLayout:
    layers = sorted(draw(st.lists(st.integers(0, layout.num_layers), min_size=2, max_size=2, unique=True)))
    heads = sorted(draw(st.lists(st.integers(0, layout.num_kv_heads), min_size=2, max_size=2, unique=True)))
    return RankLayout(layout, *layers, *heads)


@st.composite
def cases(draw: st.DrawFn) -> tuple[RankLayout, RankLayout, list[int], list[int], int, int]:
    layout = KVLayout(
        num_layers=draw(st.integers(1, 4)),
        num_kv_heads=draw(st.integers(1, 4)),
        head_dim=draw(st.integers(1, 3)),
        block_size=draw(st.integers(1, 3)),
        dtype="float32",
    )
    count = draw(st.integers(0, NUM_BLOCKS))
    blocks = st.permutations(range(NUM_BLOCKS)).map(lambda ids: ids[:count])
    start, end = sorted(draw(st.tuples(st.integers(0, layout.num_layers), st.integers(0, layout.num_layers))))
    return draw(part(layout)), draw(part(layout)), draw(blocks), draw(blocks), start, end


def region(rank: RankLayout, first: float) -> torch.Tensor:
    count = NUM_BLOCKS * rank.block_bytes // 4
    return (torch.arange(count, dtype=torch.float32) + first).view(torch.uint8)


@given(cases())
@settings(max_examples=300, deadline=None)
def test_the_plan_copies_what_an_element_wise_copy_would(
    case: tuple[RankLayout, RankLayout, list[int], list[int], int, int],
) -> None:
    source, target, source_blocks, target_blocks, start, end = case
    source_region, planned = region(source, 1), region(target, -(10**6))
    expected = planned.clone()
    from_view, to_view = source.view(source_region), target.view(expected)
    for source_block, target_block in zip(source_blocks, target_blocks, strict=True):
        for layer in range(
            max(source.layer_start, target.layer_start, start), min(source.layer_end, target.layer_end, end)
        ):
            for head in range(max(source.head_start, target.head_start), min(source.head_end, target.head_end)):
                to_view[target_block, layer - target.layer_start, :, head - target.head_start] = from_view[
                    source_block, layer - source.layer_start, :, head - source.head_start
                ]
    ranges = plan_reads(source, target, source_blocks, target_blocks, start, end)
    if len(ranges):
        check_table(ranges, source_region.numel(), planned.numel())
    for item in ranges:
        planned[item.target : item.target + item.length] = source_region[item.source : item.source + item.length]
    assert torch.equal(planned, expected)
    for before, after in itertools.pairwise(ranges):
        joined = before.source + before.length == after.source and before.target + before.length == after.target
        assert not joined, "neighbours were not merged"


LAYOUT = KVLayout(num_layers=6, num_kv_heads=4, head_dim=8, block_size=4, dtype="bfloat16")
WHOLE = RankLayout.whole(LAYOUT)


def test_consecutive_blocks_are_one_range_whatever_their_order() -> None:
    up = plan_reads(WHOLE, WHOLE, [2, 3, 4], [5, 6, 7], 0, 6)
    down = plan_reads(WHOLE, WHOLE, [4, 3, 2], [7, 6, 5], 0, 6)
    assert [*up] == [*down]
    assert [item.length for item in up] == [3 * WHOLE.block_bytes]


def test_a_layer_group_is_one_range_per_block() -> None:
    ranges = plan_reads(WHOLE, WHOLE, [2, 3], [5, 6], 1, 3)
    assert [item.length for item in ranges] == [2 * WHOLE.layer_bytes] * 2


def test_pipeline_stages_share_layers_and_disjoint_heads_share_nothing() -> None:
    upper = RankLayout(LAYOUT, 3, 6, 0, 4)
    assert shared_layers(WHOLE, upper) == range(3, 6)
    assert not shared_layers(RankLayout(LAYOUT, 0, 6, 0, 2), RankLayout(LAYOUT, 0, 6, 2, 4))
    assert plan_reads(RankLayout(LAYOUT, 0, 6, 0, 2), RankLayout(LAYOUT, 0, 6, 2, 4), [1], [1], 0, 6).num_bytes == 0


def test_offsets_beyond_32_bits_are_exact() -> None:
    big = RankLayout.whole(KVLayout(80, 8, 128, 16, "bfloat16"))
    (item,) = plan_reads(big, big, [100_000], [99_999], 0, 80)
    assert item.source == 100_000 * big.block_bytes > 2**32


def test_unlike_layouts_and_lists_are_refused() -> None:
    other = RankLayout.whole(KVLayout(6, 4, 8, 8, "bfloat16"))
    with pytest.raises(ValueError, match=r"block_size=4.*block_size=8"):
        plan_reads(WHOLE, other, [1], [1], 0, 6)
    with pytest.raises(ValueError, match="2 blocks"):
        plan_reads(WHOLE, WHOLE, [1, 2], [1], 0, 6)
