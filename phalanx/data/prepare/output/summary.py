"""What a report holds."""

from __future__ import annotations

import msgspec

from phalanx.data.prepare.counts import DroppedExample

REPORT_NAME = "report.json"
EXACT = "exact duplicates"
NEAR = "near duplicates"
NO_TOKENS = "without tokens"


class ReportStep(msgspec.Struct, frozen=True):
    """One thing that documents had to pass."""

    name: str
    says: str
    dropped: int
    left: int
    edited: int = 0  # documents that it shortened


class PrepareReport(msgspec.Struct, frozen=True):
    """The whole way from raw files to tokens."""

    key: str  # of recipe and inputs: a run with the same key has nothing to do
    out: str
    files: int
    records: int
    text_bytes: int
    steps: tuple[ReportStep, ...]
    documents: int
    kept_bytes: int
    tokens: int
    vocab: int
    shards: int
    fingerprint: str
    failed: dict[str, int]  # documents about which a classifier failed
    masked: dict[str, int]
    lengths_read: dict[int, int]
    lengths_kept: dict[int, int]
    examples: dict[str, list[DroppedExample]]
