"""Units that the core counts in: whole nanoseconds, and parts of a million."""

from __future__ import annotations

SECOND_NS = 1_000_000_000
HOUR_NS = 3600 * SECOND_NS
MILLION = 1_000_000
