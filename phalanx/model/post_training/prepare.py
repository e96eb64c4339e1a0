"""The one place that changes a model for post-training."""

from __future__ import annotations

from phalanx.config import Job
from phalanx.model.post_training.adapters import add_adapters
from phalanx.model.post_training.preference import prefer
from phalanx.model.transformer import Transformer


def prepare_post_training(part: Transformer, job: Job) -> Transformer:
    """A model part as the job's [adapter] and [preference] want it, before any axis is applied."""
    return prefer(add_adapters(part, job.adapter), job.preference)
