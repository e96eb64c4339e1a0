"""The best mapping of a workload onto a cluster, from the whole valid space."""

from __future__ import annotations

import time
from typing import Literal

import numpy as np
from msgspec import Struct

from phalanx.config import ConfigError
from phalanx.hardware import Cluster
from phalanx.plan.constants import Constants, shipped
from phalanx.plan.grid import Floats, Grid
from phalanx.plan.machine import machine_of
from phalanx.plan.memory import memory
from phalanx.plan.predict import Prediction, predict
from phalanx.plan.space import Pins, enumerate_mappings
from phalanx.plan.step import step_time
from phalanx.plan.uncertainty import Z80, spread
from phalanx.plan.workload import Mapping, Precision, Software, Workload

Objective = Literal["tokens", "dollars", "days", "memory"]
CHUNK = 16384  # mappings priced at once: their arrays stay in the cache
HEADROOM = 0.02  # of the device that a plan leaves free
SHOWN = 10


class Candidate(Struct, frozen=True):
    """A mapping that fits, with its price."""

    mapping: Mapping
    step_seconds: float
    step_seconds_p90: float
    memory_bytes: float


class SearchResult(Struct, frozen=True, kw_only=True):
    """The chosen mapping and how it compares."""

    best: Prediction
    objective: Objective
    top: tuple[Candidate, ...]  # the best few, best first
    pareto: tuple[Candidate, ...]  # no other is both faster and smaller; fastest first
    considered: int
    fitting: int
    seconds: float

    @property
    def mappings_per_second(self) -> float:
        """Speed of the search."""
        return self.considered / self.seconds


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
) -> SearchResult:
    """Price every valid mapping and choose; ``robust`` chooses by the 90th percentile.

    Raises ConfigError where no mapping is valid or none fits into memory.
    """
    began = time.perf_counter()
    gpus = gpus or cluster.gpus
    pins, software, constants = pins or Pins(), software or Software(), constants or shipped()
    if gpus > cluster.gpus:
        raise ConfigError(
            "gpus", gpus, f"the cluster has {cluster.gpus:,}", f"at most {cluster.gpus}"
        )
    grid = enumerate_mappings(workload, cluster, gpus, pins, precision)
    if len(grid) == 0:
        raise _nothing_valid(workload, gpus)
    machine = machine_of(cluster, gpus)
    limit = machine.memory_bytes * (1 - HEADROOM)
    kept: list[tuple[Grid, Floats, Floats, Floats]] = []
    smallest = (np.inf, grid.mapping(0))
    for start in range(0, len(grid), CHUNK):
        part = grid.take(slice(start, start + CHUNK))
        held = memory(workload, part, software).total
        least = int(np.argmin(held))
        if held[least] < smallest[0]:
            smallest = (float(held[least]), part.mapping(least))
        fits = held <= limit
        if fits.any():
            part, held = part.take(fits), held[fits]
            priced = step_time(workload, part, machine, constants, software)
            sure = np.exp(Z80 * spread(workload, machine, priced, precision, constants))
            kept.append((part, priced.seconds, priced.seconds * sure, held))
    if not kept:
        raise _nothing_fits(smallest, limit, gpus)
    seconds = np.concatenate([k[1] for k in kept])
    late = np.concatenate([k[2] for k in kept])
    held = np.concatenate([k[3] for k in kept])
    score = held if objective == "memory" else late if robust else seconds
    order = np.lexsort((held, score))  # of equals, the one with more room
    offsets = np.cumsum([0] + [len(k[0]) for k in kept])

    def candidate(index: int) -> Candidate:
        chunk = int(np.searchsorted(offsets, index, side="right")) - 1
        mapping = kept[chunk][0].mapping(int(index - offsets[chunk]))
        return Candidate(mapping, float(seconds[index]), float(late[index]), float(held[index]))

    best = candidate(int(order[0]))
    return SearchResult(
        best=predict(workload, best.mapping, cluster, constants=constants, software=software),
        objective=objective,
        top=tuple(candidate(int(index)) for index in order[:SHOWN]),
        pareto=tuple(candidate(int(index)) for index in _front(seconds, held)),
        considered=len(grid),
        fitting=len(seconds),
        seconds=time.perf_counter() - began,
    )


def _front(seconds: Floats, held: Floats) -> list[int]:
    """Indices that nothing beats in both time and memory, fastest first."""
    order = np.lexsort((held, seconds))
    least = np.minimum.accumulate(held[order])
    new = np.concatenate(([True], least[1:] < least[:-1]))
    return [int(index) for index in order[new]]


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


def _nothing_fits(smallest: tuple[float, Mapping], limit: float, gpus: int) -> ConfigError:
    held, mapping = smallest
    times = held / limit
    enough = 1 << math_ceil_log2(gpus * times)
    return ConfigError(
        "gpus",
        gpus,
        f"nothing fits: the smallest mapping needs {held / 2**30:.1f} GiB a GPU of "
        f"{limit / 2**30:.1f} (tensor {mapping.tensor}, pipeline {mapping.pipeline}, zero "
        f"{mapping.zero}, recompute {mapping.recompute})",
        f"try about {enough} GPUs, or GPUs with {times:.1f} times the memory",
    )


def math_ceil_log2(value: float) -> int:
    """Exponent of the least power of two that is at least ``value``."""
    return max(0, int(np.ceil(np.log2(value))))
