"""Prices published runs in bulk: runs that differ only in their mapping are priced together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from phalanx.plan.cost.constants import Constants, calibrated
from phalanx.plan.cost.step import StepSeconds, slowed_by_allocator, step_time
from phalanx.plan.cost.uncertainty import spread
from phalanx.plan.evidence.published import PublishedRun
from phalanx.plan.grid import Bools, Floats, Grid, grid_of
from phalanx.plan.machine import Machine, machine_of
from phalanx.plan.memory.peak import PeakMemory, memory
from phalanx.plan.workload import Software, Workload


@dataclass(frozen=True)
class _Together:
    workload: Workload
    software: Software
    machine: Machine
    grid: Grid
    index: list[int]
    recompute_known: Bools  # else nobody knows how full the device was
    memory: dict[Software, PeakMemory] = field(default_factory=dict)  # by what it was priced for

    def time(self, constants: Constants) -> StepSeconds:
        time = step_time(self.workload, self.grid, self.machine, constants, self.software)
        crowded = slowed_by_allocator(time, self._held(constants), self.machine, self.software)
        seconds = np.where(self.recompute_known, crowded.seconds, time.seconds)
        return StepSeconds(seconds, crowded.parts)

    def _held(self, constants: Constants) -> PeakMemory:
        software = calibrated(self.software, constants)
        if software not in self.memory:
            self.memory[software] = memory(self.workload, self.grid, software)
        return self.memory[software]


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
            grid = grid_of([runs[i].mapping for i in index_list])
            self.groups.append(
                _Together(
                    first.workload,
                    first.software,
                    machine_of(first.cluster, first.mapping.gpus),
                    grid,
                    index_list,
                    np.array([runs[i].recompute_known for i in index_list]),
                )
            )

    def families(self) -> list[str]:
        """GPU family of every run."""
        names = [""] * len(self.runs)
        for group in self.groups:
            for index in group.index:
                names[index] = group.machine.family
        return names

    def price(self, constants: Constants) -> tuple[Floats, Floats]:
        """Seconds and log-spread of every run."""
        seconds, spreads = np.zeros(len(self.runs)), np.zeros(len(self.runs))
        for group in self.groups:
            time = group.time(constants)
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

    def seconds(self, constants: Constants, only: set[str] | None = None) -> Floats:
        """Seconds of every run (of these GPU families; NaN for the others)."""
        seconds = np.full(len(self.runs), np.nan)
        for group in self.groups:
            if only is None or group.machine.family in only:
                seconds[group.index] = group.time(constants).seconds
        return seconds
