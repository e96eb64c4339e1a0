"""Constants of CPU cores from a few measured steps and collectives.

A step's time is linear in the time of its products and in the time to start a kernel, all else
being equal: two steps of one mesh that differ in their micro-batch give both. Attention alone gives
its own speed, and two collectives of different sizes give latency and bandwidth of the link.
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
LEAST_KERNEL_SECONDS = 1e-5  # what starting an operator takes on any core


class MeasuredStep(Struct, frozen=True):
    """A step on CPU ranks."""

    workload: Workload
    mapping: Mapping
    seconds: float
    attention_seconds: float  # of all its layers and micro-batches, measured alone


class MeasuredLink(Struct, frozen=True, kw_only=True):
    """Gathers and scattered sums between two ranks of a machine; bytes are those of the whole."""

    small_bytes: int
    small_seconds: float
    large_bytes: int
    large_seconds: float


def cpu_constants(
    steps: tuple[MeasuredStep, MeasuredStep], link: MeasuredLink, on: Cluster, base: Constants
) -> Constants:
    """The base constants with products, kernels and the link as they were measured."""
    constants = _with_attention(steps[0], on, _with_link(link, on, base))

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
    if usual + kernel < LEAST_KERNEL_SECONDS:  # small products are quicker than they are priced
        kernel = LEAST_KERNEL_SECONDS - usual
        slower = (measured - here - kernel * matrix[:, 1])[0] / matrix[0, 0]
    return _with_compute(constants, max(0.05, 1 + slower), usual + kernel)


def _with_compute(constants: Constants, slower: float, kernel_seconds: float) -> Constants:
    """Products that take ``slower`` times as long, and kernels that start so late."""
    return structs.replace(
        constants,
        matmul=constants.matmul | {PRODUCTS: constants.matmul[PRODUCTS] / slower},
        kernel_seconds=kernel_seconds,
    )


def _with_attention(step: MeasuredStep, on: Cluster, base: Constants) -> Constants:
    """Attention as fast as it was measured alone."""
    at_once = structs.replace(base, kernel_seconds=0.0)
    priced = predict(step.workload, step.mapping, on, constants=at_once).parts["attention"]
    share = base.attention[ATTENTION] * priced / step.attention_seconds
    return structs.replace(base, attention=base.attention | {ATTENTION: share})


def _with_link(link: MeasuredLink, on: Cluster, base: Constants) -> Constants:
    moved = (link.large_bytes - link.small_bytes) / 2  # each of two ranks has half of them already
    bandwidth = moved / max(1e-9, link.large_seconds - link.small_seconds)
    start = link.small_seconds - link.small_bytes / 2 / (LL_SHARE * bandwidth)
    return structs.replace(
        base,
        link=bandwidth / (on.link.bandwidth * on.link.efficiency),
        latency=max(1.0, start / (RING_LL[0] + RING_LL[1])),
    )
