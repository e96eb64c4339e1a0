"""The columns of the fleet as numpy sees them; apart, so that naming a node does not load numpy."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

Column = np.ndarray[tuple[int], np.dtype[np.int64]]


class Columns(Struct, frozen=True):
    """Numpy views of the columns. Never keep one across events: joining nodes replace them."""

    state: Column
    node_class: Column
    domain: Column
    leaf: Column
    pod: Column
    rack: Column
    power: Column
    switch: Column
    gpus: Column  # in the node
    free_mask: Column  # bit i: GPU i is held by no job, whatever the node's state
    free_gpus: Column  # bits in free_mask
    free_cpus: Column
    free_memory: Column
    spare_for: Column  # job whose spare it is; 0: the fleet's, or no spare
    rails_down: Column  # bit r: rail r of the node is dead (it runs degraded)
