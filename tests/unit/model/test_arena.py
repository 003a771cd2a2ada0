"""Memory for packed weights, and the request for huge pages behind it and behind KV regions."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from twinpool import huge_pages
from twinpool.huge_pages import HUGE_PAGE, ask_for_huge_pages
from twinpool.kernels import arena as arena_module
from twinpool.kernels.arena import ALIGNMENT, Arena
from twinpool.kv_transfer.connectors.region import zeroed_region


def test_pieces_are_copies_that_share_nothing() -> None:
    arena = Arena()
    given = [torch.randn(3, 5).bfloat16(), torch.randn(7, 9).T, torch.arange(33, dtype=torch.uint8)]
    kept = [arena.keep(tensor) for tensor in given]
    for tensor in kept:
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % ALIGNMENT == 0
    for tensor, copy in zip(given, kept, strict=True):
        assert torch.equal(tensor, copy)
    kept[1].zero_()
    assert torch.equal(kept[0], given[0])
    assert torch.equal(kept[2], given[2])


def test_what_a_chunk_cannot_hold_gets_a_larger_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "CHUNK_BYTES", 256)
    arena = Arena()
    small, large = arena.keep(torch.ones(200, dtype=torch.uint8)), arena.keep(torch.full((1000,), 2, dtype=torch.uint8))
    assert (small == 1).all()
    assert (large == 2).all()
    assert large.data_ptr() % HUGE_PAGE == 0


def test_only_whole_huge_pages_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    class Madvise:
        argtypes: object = None

        def __call__(self, start: int, size: int, advice: int) -> int:
            asked.append((start, size))
            return 0

    class Library:
        madvise = Madvise()

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    monkeypatch.setattr(huge_pages.mmap, "MADV_HUGEPAGE", 14, raising=False)
    ask_for_huge_pages(HUGE_PAGE + 5, 3 * HUGE_PAGE)
    ask_for_huge_pages(5, HUGE_PAGE)
    assert asked == [(2 * HUGE_PAGE, 2 * HUGE_PAGE)]


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists()
    or "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(),
    reason="this machine has no huge pages to give",
)
def test_a_region_asks_before_it_is_cleared() -> None:
    """The range of the process's memory map that holds the region carries the advice, and reads as zero."""
    region = zeroed_region(8 * HUGE_PAGE, torch.device("cpu"))
    inside = region.data_ptr() + 4 * HUGE_PAGE
    flags: list[str] = []
    within = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            within = start <= inside < end
        elif within and first == "VmFlags:":
            flags = line.split()[1:]
    assert "hg" in flags
    assert not region.any()
