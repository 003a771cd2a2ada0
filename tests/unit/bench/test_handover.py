"""The arithmetic of the hand-over's figures, on samples with known times."""

from __future__ import annotations

import pytest

from twinpool.bench.figures import Figure
from twinpool.bench.handover import _handover, _overlap, _ttft
from twinpool.bench.probe import Sample
from twinpool.results import Completion, Timings, Usage


def sample(arrivals: tuple[float, ...], **timings: float) -> Sample:
    usage = Usage(transfer_bytes=4_000_000, transport="nixl/shm")
    return Sample(arrivals, Completion("r", (), usage, Timings(**timings), "p", "d"))


REMOTE = sample(
    (0.124, 0.154, 0.174),
    queue_s=0.002,
    prefill_s=0.118,
    transfer_s=0.1,
    exposed_transfer_s=0.003,
    read_s=0.004,
    sample_s=0.005,
    confirm_s=0.001,
    schedule_s=0.002,
)
LOCAL = sample((0.121, 0.141), queue_s=0.001, prefill_s=0.117)


def test_a_figure_is_in_milliseconds_and_may_be_empty() -> None:
    assert Figure.of([0.003, 0.001, 0.002]) == Figure(2.0, 3.0, 1.0, 3)
    assert Figure.of([]).count == 0


def test_first_tokens_are_compared_pair_by_pair() -> None:
    found = _ttft([REMOTE, REMOTE], [LOCAL, LOCAL])
    assert found["difference"]["median"] == pytest.approx(3)
    assert found["disaggregated_parts"] == {"queue": 2, "prefill": 118, "ways": 4}


def test_the_handover_is_the_sum_of_its_parts() -> None:
    found = _handover([REMOTE])
    parts = found["parts_ms"]
    assert parts == {"hop": 1, "sample": 5, "read": 2, "confirm": 1, "schedule": 2}
    assert found["handover_ms"]["median"] == pytest.approx(sum(parts.values()))
    assert found["segment_read_ms"] == 1
    assert found["first_gap_ms"]["median"] == pytest.approx(30)
    assert found["later_gap_ms"]["median"] == pytest.approx(20)


def test_exposed_time_is_a_share_of_the_transfer() -> None:
    found = _overlap([REMOTE])
    assert found["exposed_share_of_transfer"] == 0.03
    assert found["exposed_read_share_of_reading"] == 0.5
    assert found["gigabytes_per_second"] == 1.0
