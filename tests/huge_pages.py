"""Memory that many forked processes share, in huge pages: a fork then copies few page tables."""

from __future__ import annotations

import ctypes
from pathlib import Path

HUGE_PAGE = 2 << 20
COLLAPSE = 25  # MADV_COLLAPSE: Linux 6.1 and later


def use_huge_pages() -> int:
    """Move what this process has allocated into huge pages; how many it has become.

    Where the kernel has none, nothing changes.
    """
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    count = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, rights, _, _, _, *names = line.split()
        if rights != "rw-p" or names not in ([], ["[heap]"]):
            continue
        first, end = (int(address, 16) for address in addresses.split("-"))
        for at in range(-(-first // HUGE_PAGE) * HUGE_PAGE, end - HUGE_PAGE + 1, HUGE_PAGE):
            count += advise(at, HUGE_PAGE, COLLAPSE) == 0
    return count
