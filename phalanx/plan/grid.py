"""Many mappings at once, as arrays: the form in which they are enumerated and priced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.plan.workload import OFFLOADS, RECOMPUTES, SCHEDULES, Mapping, Precision

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Grid:
    """Mappings of one precision; every field has one entry a mapping."""

    tensor: Ints
    pipeline: Ints
    data: Ints
    context: Ints
    expert: Ints
    zero: Ints
    replicate: Ints
    micro_batch: Ints
    virtual_stages: Ints
    recompute: Ints  # index into RECOMPUTES
    schedule: Ints  # index into SCHEDULES
    offload: Ints  # index into OFFLOADS
    precision: Precision = "bfloat16"

    def __len__(self) -> int:
        return len(self.tensor)

    @property
    def gpus(self) -> Ints:
        return self.tensor * self.pipeline * self.data * self.context

    @property
    def shards(self) -> Ints:
        """Ranks over which ZeRO divides dense parameters: the trainer's (shard, context)."""
        return np.where(self.zero > 0, self.data // self.replicate * self.context, 1)

    def micro_batches(self, global_batch: int) -> Ints:
        """Micro-batches a replica makes in a step."""
        return -(-global_batch // (self.data * self.micro_batch))

    def take(self, index: Any) -> Grid:
        """The mappings at these positions (or where a mask is true)."""
        picked = {name: getattr(self, name)[index] for name in ARRAYS}
        return replace(self, **picked)

    def mapping(self, index: int) -> Mapping:
        """One mapping as a struct."""
        row: dict[str, Any] = {name: int(getattr(self, name)[index]) for name in ARRAYS}
        for name, names in CODED.items():
            row[name] = names[row[name]]
        return Mapping(**row, precision=self.precision)


CODED = {"recompute": RECOMPUTES, "schedule": SCHEDULES, "offload": OFFLOADS}
ARRAYS = tuple(field.name for field in fields(Grid) if field.name != "precision")


def grid_of(mappings: Sequence[Mapping]) -> Grid:
    """Mappings of one precision as arrays."""
    (precision,) = {mapping.precision for mapping in mappings}

    def column(name: str) -> Ints:
        values = [getattr(mapping, name) for mapping in mappings]
        if name in CODED:
            values = [CODED[name].index(value) for value in values]
        return np.array(values, dtype=np.int64)

    return Grid(**{name: column(name) for name in ARRAYS}, precision=precision)
