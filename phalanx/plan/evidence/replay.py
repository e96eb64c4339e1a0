"""Prices published runs in bulk: runs that differ only in their mapping are priced together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.plan.cost.constants import Constants
from phalanx.plan.cost.step import step_time
from phalanx.plan.cost.uncertainty import spread
from phalanx.plan.evidence.published import PublishedRun
from phalanx.plan.grid import Floats, Grid, grid_of
from phalanx.plan.machine import Machine, machine_of
from phalanx.plan.workload import Software, Workload


@dataclass(frozen=True)
class _Together:
    workload: Workload
    software: Software
    machine: Machine
    grid: Grid
    index: list[int]


class Replay:
    """Runs made ready for pricing with any constants."""

    def __init__(self, runs: Sequence[PublishedRun]) -> None:
        groups: dict[object, list[int]] = defaultdict(list)
        for index, run in enumerate(runs):
            key = (
                run.workload,
                run.software,
                run.cluster.name,
                run.cluster.gpus,
                run.mapping.precision,
            )
            groups[key].append(index)
        self.runs = runs
        self.groups = []
        for index_list in groups.values():
            first = runs[index_list[0]]
            self.groups.append(
                _Together(
                    first.workload,
                    first.software,
                    machine_of(first.cluster, first.mapping.gpus),
                    grid_of([runs[i].mapping for i in index_list]),
                    index_list,
                )
            )

    def families(self) -> list[str]:
        """GPU family of every run."""
        names = [""] * len(self.runs)
        for group in self.groups:
            for index in group.index:
                names[index] = group.machine.family
        return names

    def price(self, constants: Constants, only: set[str] | None = None) -> tuple[Floats, Floats]:
        """Seconds and log-spread of every run (of these GPU families; NaN for the others)."""
        seconds = np.full(len(self.runs), np.nan)
        spreads = np.full(len(self.runs), np.nan)
        for group in self.groups:
            if only is not None and group.machine.family not in only:
                continue
            time = step_time(group.workload, group.grid, group.machine, constants, group.software)
            seconds[group.index] = time.seconds
            spreads[group.index] = spread(
                group.workload,
                group.machine,
                time,
                group.grid,
                constants,
                group.software,
            )
        return seconds, spreads
