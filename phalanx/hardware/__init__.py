"""The catalogue of hardware: what each device can do at its peak."""

from __future__ import annotations

from phalanx.hardware.devices import count_cuda
from phalanx.hardware.peaks import Gpu, catalogue, lookup

__all__ = ["Gpu", "catalogue", "count_cuda", "lookup"]
