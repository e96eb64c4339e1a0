"""How soon GPUs come free, by the ends of what runs, and how soon work is done on them.

Counts alone: which nodes they are is for placement. Work is in GPU-seconds, in integers that stay
far from 64 bits.
"""

from __future__ import annotations

import numpy as np

from phalanx.cluster.fleet.columns import Column
from phalanx.cluster.jobs.horizon import NEVER_NS
from phalanx.cluster.units import SECOND_NS

Wanted = dict[tuple[str, str, int], tuple[int, int]]  # GPUs and work, by team, class and length


class Supply:
    """GPUs that become free as what runs ends."""

    def __init__(self, now_ns: int, free: int, ends: list[tuple[int, int]]) -> None:
        sure_ends = np.asarray(ends, np.int64).reshape(-1, 2)
        sure_ends = sure_ends[sure_ends[:, 0] < NEVER_NS]
        sure_ends = sure_ends[np.argsort(sure_ends[:, 0], kind="stable")]
        self._ends = np.concatenate(([now_ns], np.maximum(sure_ends[:, 0], now_ns)))
        self._free = np.cumsum(np.concatenate(([free], sure_ends[:, 1])))
        self._rates = np.maximum(self._free, 0)
        # By the time of each end: what those GPUs could have done since now.
        spans = np.diff(self._ends // SECOND_NS)
        self._done = np.concatenate(([0], np.cumsum(self._rates[:-1] * spans)))

    def free_ns(self, gpus: int) -> int | None:
        """When so many are free at a time; None: never."""
        found = int(np.searchsorted(self._free, gpus))
        return int(self._ends[found]) if found < len(self._ends) else None

    def started_ns(
        self, gpus: int, ahead: int, wanted: Wanted, limits: dict[tuple[str, str], int]
    ) -> int | None:
        """When there are GPUs for one more, behind those who want ``ahead`` of them; None: never.

        All fit beside what still runs; or sooner: all work that can have been done before is done,
        and those who still run leave enough. Who wants GPUs for long is in the way with those, not
        with all of his work. A limit holds back what is beyond it.
        """
        first_ns, fit_ns = self.free_ns(gpus), self.free_ns(gpus + ahead)
        if first_ns is None or not wanted or fit_ns == first_ns:
            return first_ns
        table = _Table(wanted, limits)
        low, high = -1, 1
        if fit_ns is not None:
            high = (fit_ns - first_ns) // SECOND_NS
            if high < 1 or not self._enough(first_ns, high - 1, gpus, table):
                return fit_ns
        while not self._enough(first_ns, high, gpus, table):
            low, high = high, 2 * high
            if high > NEVER_NS // SECOND_NS // 4:
                return None
        while low + 1 < high:
            middle = (low + high) // 2
            enough = self._enough(first_ns, middle, gpus, table)
            low, high = (low, middle) if enough else (middle, high)
        return first_ns + high * SECOND_NS

    def _enough(self, first_ns: int, seconds: int, gpus: int, table: _Table) -> bool:
        at_ns = first_ns + seconds * SECOND_NS
        last = int(np.searchsorted(self._ends, at_ns, "right")) - 1
        work, busy = table.after(seconds)
        if int(self._free[last]) < busy + gpus:
            return False
        passed = (at_ns - int(self._ends[last])) // SECOND_NS
        return int(self._done[last]) + int(self._rates[last]) * passed >= work


class _Table:
    """What is wanted, as columns."""

    def __init__(self, wanted: Wanted, limits: dict[tuple[str, str], int]) -> None:
        groups = {key[:2]: None for key in wanted}
        index = {group: number for number, group in enumerate(groups)}
        rows = sorted((index[key[:2]], gpus, work) for key, (gpus, work) in wanted.items())
        columns = np.asarray(rows, np.int64).T
        self._gpus: Column = columns[1]
        self._work: Column = columns[2]
        self._starts = np.searchsorted(columns[0], np.arange(len(groups)))
        self._most = np.asarray([limits.get(group, 1 << 30) for group in groups], np.int64)

    def after(self, seconds: int) -> tuple[int, int]:
        """(what is done of it after so long, GPUs still in use then), if nobody lacks GPUs."""
        each = np.minimum(self._work, self._gpus * seconds)
        busy = np.where(self._work > each, self._gpus, 0)
        work = np.minimum(np.add.reduceat(each, self._starts), self._most * seconds)
        held = np.minimum(np.add.reduceat(busy, self._starts), self._most)
        return int(work.sum()), int(held.sum())
