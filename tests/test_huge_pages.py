"""Memory in huge pages is the same memory."""

from __future__ import annotations

from tests.huge_pages import HUGE_PAGE, use_huge_pages


def test_what_a_process_holds_stays_as_it_was() -> None:
    kept = bytearray(range(256)) * (4 * HUGE_PAGE // 256)
    before = bytes(kept)
    assert use_huge_pages() >= 0
    assert kept == before
