"""What is wrong with a gang, read from its records: pure functions, each with its evidence.

To add one: a function here from integers to a finding or None, an event for the finding, a handler
in ``recovery/incidents.py`` and a test with clean noise beside the one with the fault. Faults that
a node reports of its own hardware are no detectors: ``control/agent/faults`` reads them.
"""

from __future__ import annotations

from phalanx.cluster.detectors.corruption import FingerprintVerdict, told_wrong, vote
from phalanx.cluster.detectors.hang import behind
from phalanx.cluster.detectors.idle import ActivityWindow
from phalanx.cluster.detectors.lemon import score
from phalanx.cluster.detectors.series import loss_spike, regression, starved
from phalanx.cluster.detectors.straggler import (
    SlowPart,
    Straggler,
    slow_compute,
    slow_host,
    slow_transfer,
)

__all__ = [
    "ActivityWindow",
    "FingerprintVerdict",
    "SlowPart",
    "Straggler",
    "behind",
    "loss_spike",
    "regression",
    "score",
    "slow_compute",
    "slow_host",
    "slow_transfer",
    "starved",
    "told_wrong",
    "vote",
]
