"""Every axis of parallelism, one file each, and the engine that composes them."""

from phalanx.parallel.engine import Engine, Weight, all_sum
from phalanx.parallel.expert import update_expert_biases
from phalanx.parallel.mesh import Mesh, build_mesh
from phalanx.parallel.precision import LossScale
from phalanx.parallel.virtual import exact_scalars

__all__ = [
    "Engine",
    "LossScale",
    "Mesh",
    "Weight",
    "all_sum",
    "build_mesh",
    "exact_scalars",
    "update_expert_biases",
]
