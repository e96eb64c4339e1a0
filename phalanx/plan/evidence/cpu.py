"""Constants of CPU cores from a few measured steps and collectives.

A step's time is linear in the time of its products and in the time to start a kernel, all else
being equal: two steps of one mesh that differ in their micro-batch give both. Two collectives of
different sizes give latency and bandwidth of the link.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct, structs

from phalanx.config import ConfigError
from phalanx.hardware import Cluster
from phalanx.plan.cost.collectives import LL_SHARE, RING_LL
from phalanx.plan.cost.constants import Constants
from phalanx.plan.cost.predict import predict
from phalanx.plan.workload import Mapping, Workload

PRODUCTS, ATTENTION = "cpu:bfloat16", "cpu:flash2"


class MeasuredStep(Struct, frozen=True):
    """A step on CPU ranks."""

    workload: Workload
    mapping: Mapping
    seconds: float


class MeasuredLink(Struct, frozen=True, kw_only=True):
    """All-gathers between two ranks of one machine; bytes are those that each has afterwards."""

    small_bytes: int
    small_seconds: float
    large_bytes: int
    large_seconds: float


def cpu_constants(
    steps: tuple[MeasuredStep, MeasuredStep], link: MeasuredLink, on: Cluster, base: Constants
) -> Constants:
    """The base constants with products, kernels and the link as they were measured."""
    constants = _with_link(link, on, base)

    def seconds(
        slower: float, kernel_seconds: float
    ) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        trial = _with_compute(constants, slower, kernel_seconds)
        return np.array(
            [predict(s.workload, s.mapping, on, constants=trial).step_seconds for s in steps]
        )

    usual = constants.kernel_seconds
    here, slow, late = seconds(1.0, usual), seconds(2.0, usual), seconds(1.0, 2 * usual)
    matrix = np.stack((slow - here, (late - here) / usual), axis=1)
    measured = np.array([step.seconds for step in steps])
    if abs(np.linalg.det(matrix)) < 1e-12:
        rule, fix = "the two steps say the same", "measure two sizes of micro-batch"
        raise ConfigError("steps", [step.seconds for step in steps], rule, fix)
    slower, kernel = np.linalg.solve(matrix, measured - here)
    return _with_compute(constants, max(0.05, 1 + slower), max(1e-7, usual + kernel))


def _with_compute(constants: Constants, slower: float, kernel_seconds: float) -> Constants:
    """Products that take ``slower`` times as long, and kernels that start so late."""
    return structs.replace(
        constants,
        matmul=constants.matmul | {PRODUCTS: constants.matmul[PRODUCTS] / slower},
        attention=constants.attention | {ATTENTION: constants.attention[ATTENTION] / slower},
        kernel_seconds=kernel_seconds,
    )


def _with_link(link: MeasuredLink, on: Cluster, base: Constants) -> Constants:
    moved = (link.large_bytes - link.small_bytes) / 2  # each of two ranks has half of them already
    bandwidth = moved / max(1e-9, link.large_seconds - link.small_seconds)
    start = link.small_seconds - link.small_bytes / 2 / (LL_SHARE * bandwidth)
    return structs.replace(
        base,
        link=bandwidth / (on.link.bandwidth * on.link.efficiency),
        latency=max(1.0, start / (RING_LL[0] + RING_LL[1])),
    )
