"""How many samples the steps of a run hold: the same for all, or changing at token counts."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from phalanx.config.schema import Job


class BatchRamp(NamedTuple):
    """Batches that follow one another, as a function of the samples that a run has read.

    A batch never changes within a step, so each stage ends with the step that reaches its edge.
    """

    edges: tuple[int, ...]  # samples after which the next batch holds, ascending
    batches: tuple[int, ...]  # one more than edges

    @property
    def largest(self) -> int:
        """Most samples in a step."""
        return max(self.batches)

    def at(self, samples: int) -> int:
        """Samples in the step of a run that has read so many."""
        return self.batches[bisect_right(self.edges, samples)]

    def samples(self, steps: int) -> int:
        """Samples in the first ``steps`` steps of a run."""
        read = 0
        for edge, batch in zip(self.edges, self.batches, strict=False):
            inside = min(steps, max(0, -(-(edge - read) // batch)))
            read, steps = read + inside * batch, steps - inside
        return read + steps * self.batches[-1]


def constant_batch(samples: int) -> BatchRamp:
    """Steps that are all alike."""
    return BatchRamp((), (samples,))


def batch_ramp(job: Job) -> BatchRamp:
    """What ``train.batch_ramp`` and ``train.global_batch`` describe."""
    stages, sequence = job.train.batch_ramp, job.data.sequence
    edges = tuple(-(-stage.until_tokens // sequence) for stage in stages)
    return BatchRamp(edges, (*(stage.global_batch for stage in stages), job.train.global_batch))
