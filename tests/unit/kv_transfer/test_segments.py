from twinpool.kv_transfer.messages import Segment
from twinpool.kv_transfer.segments import merge_segments, split_segment


def test_neighbours_in_blocks_or_layers_merge() -> None:
    chunks = [Segment(1, 0, 0, (5, 6), 0, 4), Segment(1, 0, 2, (9,), 0, 4)]
    assert merge_segments(chunks) == [Segment(1, 0, 0, (5, 6, 9), 0, 4)]
    groups = [Segment(1, 0, 3, (7,), 0, 2), Segment(1, 0, 3, (7,), 2, 4)]
    assert merge_segments(groups) == [Segment(1, 0, 3, (7,), 0, 4)]


def test_what_is_no_rectangle_stays_apart() -> None:
    for other in (
        Segment(1, 1, 2, (9,), 0, 4),
        Segment(2, 0, 2, (9,), 0, 4),
        Segment(1, 0, 3, (9,), 0, 4),
        Segment(1, 0, 2, (9,), 0, 2),
        Segment(1, 0, 0, (5, 7), 4, 6),
    ):
        assert len(merge_segments([Segment(1, 0, 0, (5, 6), 0, 4), other])) == 2


def test_split_keeps_order_and_indices() -> None:
    segment = Segment(1, 0, 10, tuple(range(100, 107)), 0, 4)
    parts = list(split_segment(segment, 3))
    assert [len(part.block_ids) for part in parts] == [3, 3, 1]
    assert [part.first_block for part in parts] == [10, 13, 16]
    assert merge_segments(parts) == [segment]
