"""Huge pages for memory that is read from end to end: fewer address translations, and hardware fetches further ahead.

Linux gives a page of 2 MiB to what was asked for and is written for the first time; elsewhere, and where the machine's
administrator has switched them off, nothing changes.
"""

from __future__ import annotations

import ctypes
import mmap

HUGE_PAGE = 2 << 20


def ask_for_huge_pages(address: int, num_bytes: int) -> None:
    """Asks for the whole huge pages inside ``num_bytes`` at ``address``, memory that nothing was written to yet."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    start, end = -(-address // HUGE_PAGE) * HUGE_PAGE, (address + num_bytes) // HUGE_PAGE * HUGE_PAGE
    if advice is None or end <= start:
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    madvise(start, end - start, advice)  # a refusal leaves the pages as they are
