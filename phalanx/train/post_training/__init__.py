"""What post-training attaches to the loop: rewards as metrics, weights for a running engine."""

from __future__ import annotations

from phalanx.config import Job
from phalanx.train.callback import Callback
from phalanx.train.post_training.hand_off import WeightHandOff
from phalanx.train.post_training.preference_metrics import PreferenceMetrics

__all__ = ["WeightHandOff", "post_training_callbacks"]


def post_training_callbacks(job: Job) -> list[Callback]:
    """Those that a job's settings ask for."""
    callbacks: list[Callback] = []
    if job.preference.kind != "none":
        callbacks.append(PreferenceMetrics(job.log.every))
    if job.hand_off.every:
        callbacks.append(WeightHandOff(job.hand_off))
    return callbacks
