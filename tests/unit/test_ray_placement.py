"""Which ranks share a bundle, and which bundle takes which rank."""

from __future__ import annotations

import pytest

from twinpool.config import RaySection
from twinpool.errors import ConfigError
from twinpool.worker.ray_launcher import _device_index
from twinpool.worker.ray_placement import bundle_of_ranks, rank_needs, ranks_per_bundle, room


@pytest.mark.parametrize(
    ("tp_size", "pp_size", "own", "others", "expected"),
    [
        (2, 1, 2, [], [2]),
        (2, 2, 2, [2], [2, 2]),
        (2, 2, 4, [], [2, 2]),
        (4, 2, 4, [3, 3], [1] * 8),  # no second node holds a TP group
        (2, 1, 1, [1], [1, 1]),
        (2, 2, 1, [2, 2], [1] * 4),  # rank 0's node holds no TP group
        (2, 1, 0, [4], None),  # rank 0 is where it is
        (2, 1, 1, [], None),
        (2, 2, 2, [1], None),
    ],
)
def test_a_tp_group_stays_on_a_node_where_it_fits(
    tp_size: int, pp_size: int, own: int, others: list[int], expected: list[int] | None
) -> None:
    assert ranks_per_bundle(tp_size, pp_size, own, others) == expected


def test_needs_and_room() -> None:
    needs = rank_needs(RaySection(cpus_per_rank=0.1), True)
    assert needs == {"CPU": 0.1, "GPU": 1.0}
    assert room({"CPU": 0.3, "GPU": 8.0}, needs) == 3  # whatever floats make of 0.3 / 0.1
    assert room({"CPU": 64.0}, needs) == 0
    assert rank_needs(RaySection(cpus_per_rank=2), False) == {"CPU": 2.0}


def test_ranks_fill_bundles_in_order() -> None:
    needs = {"CPU": 1.0}
    assert bundle_of_ranks([{"CPU": 2.0}, {"CPU": 1.0}, {"CPU": 3.0}], needs, 4) == [0, 0, 1, 2]
    with pytest.raises(ConfigError, match="room for 3 of 4 ranks"):
        bundle_of_ranks([{"CPU": 2.0}, {"CPU": 1.9}], needs, 4)


def test_the_gpu_of_rank_0_is_found_among_those_it_sees() -> None:
    assert _device_index("5", None) == 5
    assert _device_index("5", "3,5") == 1
    with pytest.raises(ConfigError, match="show it that GPU"):
        _device_index("5", "0,1")
