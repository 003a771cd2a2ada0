"""Computing threads keep to the cores that the configuration names."""

from __future__ import annotations

import os
import threading

import pytest

from twinpool.config import EngineSection
from twinpool.errors import ConfigError
from twinpool.worker.cores import cores_for, pin_thread

ALLOWED = sorted(os.sched_getaffinity(0))


def section(threads: int, *cores: int) -> EngineSection:
    return EngineSection(threads=threads, cores=cores)


@pytest.mark.skipif(len(ALLOWED) < 2, reason="one core")
def test_ranks_have_cores_of_their_own_where_there_are_enough() -> None:
    a, b = ALLOWED[:2]
    assert cores_for(section(1), 0, 1) == frozenset()
    assert cores_for(section(1, a, b), 0, 1) == {a}
    assert [cores_for(section(1, a, b), rank, 2) for rank in range(2)] == [{a}, {b}]
    assert [cores_for(section(2, a, b), rank, 2) for rank in range(2)] == [{a, b}, {a, b}]
    assert cores_for(section(0, a, b), 0, 1) == {a}


def test_a_core_that_is_not_ours_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"engine.cores names 9999, but this process may use"):
        cores_for(section(1, ALLOWED[0], 9999), 0, 1)


def test_only_the_calling_thread_and_its_children_are_pinned() -> None:
    seen: list[set[int]] = []

    def child() -> None:
        seen.append(os.sched_getaffinity(0))

    def compute() -> None:
        pin_thread(frozenset(ALLOWED[:1]))
        helper = threading.Thread(target=child)
        helper.start()
        helper.join()

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert seen == [set(ALLOWED[:1])]
    assert os.sched_getaffinity(0) == set(ALLOWED)
