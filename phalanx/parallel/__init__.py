"""Every axis of parallelism, one file each, and the engine that composes them."""

from phalanx.parallel.collectives import all_sum
from phalanx.parallel.engine import Engine
from phalanx.parallel.expert import balance_experts
from phalanx.parallel.mesh import Mesh, build_mesh
from phalanx.parallel.precision import LossScale
from phalanx.parallel.virtual import exact_scalars
from phalanx.parallel.weight import Weight

__all__ = [
    "Engine",
    "LossScale",
    "Mesh",
    "Weight",
    "all_sum",
    "balance_experts",
    "build_mesh",
    "exact_scalars",
]
