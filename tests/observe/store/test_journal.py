"""The ledger over time holds what a large fleet spends in years."""

from __future__ import annotations

from pathlib import Path

from phalanx.observe.store.journal import Journal


def test_sums_beyond_64_bits_come_back_exactly(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "runs.sqlite")
    year_of_100k_gpus = 100_000 * 365 * 24 * 3600 * 10**9
    assert year_of_100k_gpus > 2**64
    journal.note_ledger(1, {"fleet": {"productive": year_of_100k_gpus, "restart": 7}})
    assert journal.ledger("fleet", 0, 2) == [(1, {"productive": year_of_100k_gpus, "restart": 7})]
