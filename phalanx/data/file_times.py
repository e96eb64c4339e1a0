"""Times of files as versions of their content.

Two writes within one step of the file system's clock leave the same time. Whoever takes a time for
a version first waits until that step is over: what is written later has another time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

STEP_SECONDS = 0.05  # Linux's clock for files goes in steps of 1 to 10 ms
WHOLE_SECONDS = 2.0  # of file systems that keep no fractions of a second
MOST_LOOKS = 5  # at a file that is written all the time; its reader notices the change


def unsettled_seconds(changed_ns: int, now_ns: int) -> float:
    """How long a file may still change without its time telling."""
    step = STEP_SECONDS if changed_ns % 10**9 else WHOLE_SECONDS
    return max(0.0, step - abs(now_ns - changed_ns) / 1e9)


def settled_stats(paths: Sequence[Path | str]) -> list[os.stat_result]:
    """What the file system says of files, each change of which will show in their times."""
    for _ in range(MOST_LOOKS):
        stats = [Path(path).stat() for path in paths]
        now_ns = time.time_ns()
        wait = max((unsettled_seconds(each.st_mtime_ns, now_ns) for each in stats), default=0.0)
        if not wait:
            break
        time.sleep(wait)
    return stats
