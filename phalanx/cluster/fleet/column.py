"""The type of a column of the fleet; apart, so that naming a node does not load numpy."""

from __future__ import annotations

import numpy as np

Column = np.ndarray[tuple[int], np.dtype[np.int64]]
