"""Compiled kernels and tuned matmuls that outlive a process: bundles, and a folder of this node."""

from phalanx.train.kernels.sharing import kernel_sharing

__all__ = ["kernel_sharing"]
