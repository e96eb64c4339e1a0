"""Sums over virtual replicas in one fixed order: the same bits on any number of data replicas."""

from phalanx.parallel.virtual.gradients import VirtualGradients
from phalanx.parallel.virtual.scalars import exact_scalars, losses_by_replica

__all__ = ["VirtualGradients", "exact_scalars", "losses_by_replica"]
