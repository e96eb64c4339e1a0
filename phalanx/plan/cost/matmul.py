"""Time of a matrix product from its shape.

A product [m, k] x [k, n] is cut into tiles that are dealt out to the multiprocessors in waves:

    seconds = 2 * waves * multiprocessors * tile_m * tile_n * (k + depth) / (rate * quality)

with waves = ceil(tiles / multiprocessors), the best of several tile shapes, and never below
the time to move the operands. ``depth`` is what filling and draining the pipeline of a tile
costs, in elements of k. Weights whose sides are no multiples of 64 miss the wide memory accesses;
how many tokens there are does not matter for it, since no row of an operand is that long.
"""

from __future__ import annotations

import numpy as np

from phalanx.plan.cost.constants import Constants
from phalanx.plan.grid import Bools, Floats
from phalanx.plan.machine import Machine

# Rows, columns, and the share of a large tile's speed (a small one loads more per product).
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.93), (128, 64, 0.78), (64, 64, 0.6))
BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "fp8": 1.0, "mxfp8": 1.0, "nvfp4": 0.5}


def sustained_rate(machine: Machine, precision: str, constants: Constants) -> float:
    """FLOP/s that large products reach: peak, less what power and issue limits take."""
    table = constants.matmul
    kind = "bfloat16" if precision in ("float16", "float32") else precision
    share = table.get(f"{machine.family}:{kind}", table["default"])
    return machine.peak(precision) * min(1.0, share * float(machine.power**constants.power))


def matmul_seconds(
    m: Floats,
    n: Floats,
    k: Floats,
    machine: Machine,
    precision: str,
    constants: Constants,
    together: Floats | float = 1.0,
    aligned: Bools | bool = True,
) -> Floats:
    """Seconds of one product on one GPU once it runs, elementwise over arrays of shapes.

    ``together``: so many of them in one kernel, which deals out the tiles of all. ``aligned``:
    whether weights have rows and columns of multiples of 64.
    """
    processors = machine.multiprocessors
    work: Floats | None = None
    for rows, columns, quality in TILES:
        tiles = together * np.ceil(m / rows) * np.ceil(n / columns)
        waves = np.ceil(tiles / processors)
        this = waves * (processors * rows * columns / quality)
        work = this if work is None else np.minimum(work, this)
    assert work is not None
    rate = sustained_rate(machine, precision, constants) * np.where(
        aligned, 1.0, constants.misaligned
    )
    compute = 2 * work * (k + constants.matmul_depth) / rate
    width = BYTES[precision]
    traffic = together * (width * (m * k + k * n) + 2 * m * n)
    moving = traffic / (machine.memory_bandwidth * constants.memory)
    seconds: Floats = np.maximum(compute, moving)
    return seconds
