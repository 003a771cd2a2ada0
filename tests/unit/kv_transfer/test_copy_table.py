import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinpool.kv_transfer.block_table import BlockTable, decode_table
from twinpool.kv_transfer.copy_table import CopyRange, CopyTable, joined


@st.composite
def tables(draw: st.DrawFn) -> CopyTable:
    if draw(st.booleans()):
        pairs = draw(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=20))
        return BlockTable([pair[0] for pair in pairs], [pair[1] for pair in pairs], draw(st.integers(1, 40)))
    ranges = st.tuples(st.integers(0, 999), st.integers(0, 999), st.integers(1, 50))
    return CopyTable.of(draw(st.lists(ranges, max_size=20)))


def moved(table: CopyTable) -> list[tuple[int, int]]:
    """Every byte: from where to where, in order."""
    return [(item.source + i, item.target + i) for item in table for i in range(item.length)]


@given(tables(), st.integers(1, 120), st.integers(1, 6))
@settings(max_examples=300, deadline=None)
def test_slices_move_the_same_bytes_within_their_bounds(table: CopyTable, max_bytes: int, max_ranges: int) -> None:
    before = [*table]
    slices = table.slices(max_bytes, max_ranges)
    assert [pair for part in slices for pair in moved(part)] == moved(table)
    assert all(0 < part.num_bytes <= max_bytes and 0 < len(part) <= max_ranges for part in slices)
    assert [*table] == before
    if not isinstance(table, BlockTable):
        for part in slices[:-1]:
            assert part.num_bytes == max_bytes or len(part) == max_ranges, "a slice has room left"


@given(tables())
def test_what_is_encoded_comes_back(table: CopyTable) -> None:
    back = decode_table(table.encode())
    assert type(back) is type(table)
    assert [*back] == [*table]
    assert back.num_bytes == table.num_bytes == sum(item.length for item in table)


@pytest.mark.parametrize("payload", [b"", b"\0" * 7, b"\0" * 24, b"\1" + b"\0" * 15, b"\0" * 33])
def test_what_is_no_table_is_refused(payload: bytes) -> None:
    with pytest.raises(ValueError, match="no table"):
        decode_table(payload)


@given(st.lists(tables(), min_size=1, max_size=4), st.integers(0, 3))
def test_joining_and_repeating(parts: list[CopyTable], times: int) -> None:
    assert [*joined(parts)] == [item for part in parts for item in part]
    repeated = parts[0].repeat(times)
    assert [*repeated] == [*parts[0]] * times
    assert repeated.num_bytes == times * parts[0].num_bytes


@given(tables(), st.integers(0, 1100), st.integers(0, 1100))
def test_the_first_range_outside_is_found(table: CopyTable, source_bytes: int, target_bytes: int) -> None:
    expected = [
        item for item in table if item.source + item.length > source_bytes or item.target + item.length > target_bytes
    ]
    assert table.outside(source_bytes, target_bytes) == (expected[0] if expected else None)


@pytest.mark.parametrize(
    "bad", [(-1, 0, 2), (0, -1, 2), (0, 0, 0), (0, 0, -1), (2**63 - 1, 0, 2**63 - 1), (0, 2**63 - 2, 5)]
)
def test_senseless_ranges_are_outside(bad: tuple[int, int, int]) -> None:
    assert CopyTable.of([(0, 0, 1), bad]).outside(100, 100) == CopyRange(*bad)


def test_a_table_of_blocks_makes_rows_of_64_bits() -> None:
    table = BlockTable([100_000], [99_999], 1 << 20)
    assert table.rows.dtype == np.int64
    assert [*table] == [(100_000 << 20, 99_999 << 20, 1 << 20)]
