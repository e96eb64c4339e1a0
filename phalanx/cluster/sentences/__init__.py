"""What people read: a sentence for each code of a reason, in one table for each sub-package.

Plain data, filled with a reason's facts. A code that stands in no table reads as its own words with
the facts behind them.
"""

from __future__ import annotations

from phalanx.cluster.sentences import (
    core,
    fleet,
    forecast,
    gang,
    jobs,
    placement,
    queue,
    recovery,
)

TABLES = (
    *(core.SENTENCES, fleet.SENTENCES, forecast.SENTENCES, gang.SENTENCES),
    *(jobs.SENTENCES, placement.SENTENCES, queue.SENTENCES, recovery.SENTENCES),
)
SENTENCES = {code: sentence for table in TABLES for code, sentence in table.items()}
