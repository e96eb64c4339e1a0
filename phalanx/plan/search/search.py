"""The best mapping of a workload onto a cluster, from the whole valid space.

Every way to divide the GPUs first gets a floor: its step without recompute, without traffic of
the data axis, without optimizer and offload, which no choice of those can beat. Divisions are
then priced from the lowest floor up, and left alone once their floor says that they can neither
be among the best nor lie on the front of time against memory. Offload only ever adds time: it
is tried where a mapping does not fit without it, or where it is pinned.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

import numpy as np
from msgspec import Struct

from phalanx.config import ConfigError
from phalanx.hardware import Cluster
from phalanx.plan.cost.constants import Constants, calibrated, shipped
from phalanx.plan.cost.predict import Prediction, predict
from phalanx.plan.cost.step import floor_seconds, step_time
from phalanx.plan.cost.uncertainty import Z80, least_spread, spread
from phalanx.plan.grid import Bools, Floats, Grid, Ints
from phalanx.plan.machine import Machine, machine_of
from phalanx.plan.memory.offload import ROOM_SHARE, fits_host
from phalanx.plan.memory.peak import memory
from phalanx.plan.question.quantities import size
from phalanx.plan.search.pareto_front import (
    ParetoFront,
    PricedMapping,
    PricedMappings,
    SmallestMapping,
)
from phalanx.plan.search.space import Pins, Space, least_held, offloaded
from phalanx.plan.workload import Mapping, Precision, Software, Workload, usual_software

Objective = Literal["tokens", "dollars", "days", "memory"]
CHUNK = 16384  # mappings priced at once: their arrays stay in the cache
HEADROOM = 0.02  # of the device that a plan leaves free


class MappingCandidate(Struct, frozen=True):
    """A mapping that fits, with its price."""

    mapping: Mapping
    step_seconds: float
    step_seconds_p90: float
    memory_bytes: float


class SearchResult(Struct, frozen=True, kw_only=True):
    """The chosen mapping and how it compares."""

    best: Prediction
    objective: Objective
    top: tuple[MappingCandidate, ...]  # the best few, best first
    # No other is both faster and smaller, up to twice the fastest step; fastest first.
    pareto: tuple[MappingCandidate, ...]
    considered: int  # valid mappings
    priced: int  # of these (and of their offloaded variants), those that bounds did not exclude
    seconds: float


def search(
    workload: Workload,
    cluster: Cluster,
    *,
    gpus: int | None = None,
    pins: Pins | None = None,
    objective: Objective = "tokens",
    robust: bool = True,
    precision: Precision = "bfloat16",
    constants: Constants | None = None,
    software: Software | None = None,
    exhaustive: bool = False,
) -> SearchResult:
    """Find the best mapping; ``robust`` chooses by the 90th percentile.

    ``exhaustive`` prices every mapping that fits, with the same result. Raises ConfigError where
    no mapping is valid or none fits into memory.
    """
    began = time.perf_counter()
    gpus = gpus or cluster.gpus
    if gpus > cluster.gpus:
        raise ConfigError(
            "gpus", gpus, f"the cluster has {cluster.gpus:,}", f"at most {cluster.gpus}"
        )
    pins = pins or Pins()
    space = Space(workload, cluster, gpus, pins, precision)
    constants = constants or shipped(cluster.gpu.family)
    asked = _Search(
        workload,
        machine_of(cluster, gpus),
        constants,
        calibrated(software or usual_software(cluster.gpu.family), constants),
        precision,
        "memory" if objective == "memory" else "late" if robust else "seconds",
        exhaustive,
        may_offload=pins.offload is None,
    )
    considered = int(space.allowed(space.rows).sum())
    if not considered:
        raise _nothing_valid(workload, gpus)
    priced = asked.run(space)
    if not priced.priced:
        assert priced.smallest is not None
        raise _nothing_fits(priced.smallest, asked.limit, asked.machine, gpus)
    top, front = priced.result()
    best = top[0].mapping
    return SearchResult(
        best=predict(workload, best, cluster, constants=asked.constants, software=asked.software),
        objective=objective,
        top=tuple(_candidate(one) for one in top),
        pareto=tuple(_candidate(one) for one in front),
        considered=considered,
        priced=priced.priced,
        seconds=time.perf_counter() - began,
    )


@dataclass(frozen=True)
class _Search:
    """One search: what is priced, and on what."""

    workload: Workload
    machine: Machine
    constants: Constants
    software: Software
    precision: Precision
    score: Literal["late", "seconds", "memory"]
    exhaustive: bool
    may_offload: bool

    @property
    def limit(self) -> float:
        """Bytes of a device that a plan may use."""
        return self.machine.memory_bytes * (1 - HEADROOM)

    def run(self, space: Space) -> ParetoFront:
        """Price the space from the lowest floor up."""
        rows, floors = space.rows, self._floors(space)
        order = np.argsort(floors, kind="stable")
        front = ParetoFront(self.score, self._surely())
        each = max(1, CHUNK // len(space.choices))
        for start in range(0, len(rows), each):
            chunk = order[start : start + each]
            if not self.exhaustive and front.is_beyond(float(floors[chunk[0]])):
                break
            self._price(space, rows[chunk], floors[chunk], front)
        return front

    def _floors(self, space: Space) -> Floats:
        grid = space.divisions()
        parts = [
            floor_seconds(
                self.workload,
                grid.take(slice(start, start + CHUNK)),
                self.machine,
                self.constants,
                self.software,
            )
            for start in range(0, len(grid), CHUNK)
        ]
        return np.concatenate(parts)

    def _surely(self) -> float:
        """What the 90th percentile of any step is at least, over its mean."""
        least = least_spread(
            self.workload, self.machine, self.precision, self.constants, self.software
        )
        return float(np.exp(Z80 * least))

    def _price(self, space: Space, rows: Ints, floors: Floats, front: ParetoFront) -> None:
        which, grid = space.grid(rows)
        fitting = self._fitting(grid, floors[which], front)
        if self.may_offload and not fitting.all():
            which, grid = which[~fitting], grid.take(~fitting)
            hopeful = self._hopeful(grid, front)
            which, grid = which[hopeful], grid.take(hopeful)
            each = CHUNK // 8  # a mapping has up to fourteen offloaded variants
            for start in range(0, len(grid), each):
                part = slice(start, start + each)
                origin, many = offloaded(grid.take(part))
                self._fitting(many, floors[which[part]][origin], front)

    def _hopeful(self, grid: Grid, front: ParetoFront) -> Bools:
        """Mappings that some offload makes fit, and that matter even if it cost no time."""
        least = np.full(len(grid), np.inf)
        for variant in least_held(grid):
            least = np.minimum(least, memory(self.workload, variant, self.software).total)
        hopeful: Bools = least <= self.limit
        if self.exhaustive or not hopeful.any():
            return hopeful
        kept = grid.take(hopeful)
        bare = step_time(self.workload, kept, self.machine, self.constants, self.software)
        hopeful[hopeful] = front.may_matter(bare.seconds, least[hopeful])
        return hopeful

    def _fitting(self, grid: Grid, floors: Floats, front: ParetoFront) -> Bools:
        """Price the mappings that fit; returns which those are."""
        held = memory(self.workload, grid, self.software)
        total = held.total
        fits = (total <= self.limit) & fits_host(held.away, self.machine)
        front.saw(grid, total, held.away)
        wanted = fits if self.exhaustive else fits & front.may_matter(floors, total)
        if wanted.any():
            part = grid.take(wanted)
            priced = step_time(self.workload, part, self.machine, self.constants, self.software)
            wide = spread(
                self.workload,
                self.machine,
                priced,
                part,
                self.constants,
                self.software,
            )
            late = priced.seconds * np.exp(Z80 * wide)
            front.add(PricedMappings(part, priced.seconds, late, total[wanted]))
        return fits


def _candidate(one: PricedMapping) -> MappingCandidate:
    return MappingCandidate(one.mapping, one.seconds, one.late, one.held)


def _nothing_valid(workload: Workload, gpus: int) -> ConfigError:
    batch = workload.global_batch
    return ConfigError(
        "gpus",
        gpus,
        "no mapping is valid: tensor must divide the heads and stay in the NVLink domain, "
        f"pipeline may not exceed {workload.model.layers} layers, and data may not exceed the "
        f"{batch} samples of a step",
        "another number of GPUs, a larger global batch, or fewer pins",
    )


def _nothing_fits(least: SmallestMapping, limit: float, machine: Machine, gpus: int) -> ConfigError:
    mapping = least.mapping
    what = (
        f"tensor {mapping.tensor}, pipeline {mapping.pipeline}, zero {mapping.zero}, recompute "
        f"{mapping.recompute}, offload {mapping.offload}"
    )
    if least.held <= limit:
        places = (
            ("host memory", least.host, ROOM_SHARE * machine.host_memory_bytes),
            ("NVMe", least.nvme, ROOM_SHARE * machine.nvme_bytes),
        )
        short = [
            f"{size(wanted)} a GPU exceed the {size(offered)} of {place}"
            for place, wanted, offered in places
            if wanted > offered
        ]
        rule = f"nothing fits: {' and '.join(short)} ({what})"
        return ConfigError("gpus", gpus, rule, "more GPUs, or servers with more of it")
    times = least.held / limit
    enough = 1 << math_ceil_log2(gpus * times)
    return ConfigError(
        "gpus",
        gpus,
        f"nothing fits: the smallest mapping needs {least.held / 2**30:.1f} GiB a GPU of "
        f"{limit / 2**30:.1f} ({what})",
        f"try about {enough} GPUs, or GPUs with {times:.1f} times the memory",
    )


def math_ceil_log2(value: float) -> int:
    """Exponent of the least power of two that is at least ``value``."""
    return max(0, int(np.ceil(np.log2(value))))
