"""How steps change during a run, at token counts: their batch, and the length of their samples."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from msgspec import structs

from phalanx.config.schema import Job, Schedule, Stage


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

    def steps_within(self, samples: int) -> int:
        """Whole steps within the first ``samples`` samples of a run."""
        read = made = 0
        for edge, batch in zip(self.edges, self.batches, strict=False):
            inside = max(0, -(-(edge - read) // batch))
            if read + inside * batch >= samples:
                return made + (samples - read) // batch
            read, made = read + inside * batch, made + inside
        return made + (samples - read) // self.batches[-1]

    def steps_reaching(self, samples: int) -> int:
        """Fewest steps in which a run reads so many samples."""
        within = self.steps_within(samples)
        return within if self.samples(within) == samples else within + 1


class SampleSpan(NamedTuple):
    """Where samples of one length begin, in samples and in tokens of the run."""

    first: int
    tokens: int
    sequence: int

    def reaches(self, tokens: int) -> int:
        """Samples that a run has read when it reaches so many tokens within this span."""
        return self.first + -(-(tokens - self.tokens) // self.sequence)

    def tokens_before(self, sample: int) -> int:
        """Tokens of the run before a sample of this span."""
        return self.tokens + (sample - self.first) * self.sequence


class StageJob(NamedTuple):
    """A stretch of a run as a job of its own, without stages."""

    first: int  # samples that the run has read before it
    job: Job


def constant_batch(samples: int) -> BatchRamp:
    """Steps that are all alike."""
    return BatchRamp((), (samples,))


def batch_ramp(job: Job) -> BatchRamp:
    """What ``train.batch_ramp``, ``train.global_batch`` and ``train.sequence_stages`` describe."""
    train, sequence = job.train, job.data.sequence
    edges = [-(-stage.until_tokens // sequence) for stage in train.batch_ramp]
    batches = [*(stage.global_batch for stage in train.batch_ramp), train.global_batch]
    edges += [span.first for span in sample_spans(job)[1:]]
    batches += [stage.global_batch or train.global_batch for stage in train.sequence_stages]
    return BatchRamp(tuple(edges), tuple(batches))


def sample_spans(job: Job) -> list[SampleSpan]:
    """The lengths of a run's samples; each begins with the sample that reaches its token count."""
    spans = [SampleSpan(0, 0, job.data.sequence)]
    for stage in job.train.sequence_stages:
        before = spans[-1]
        first = max(before.first + 1, before.reaches(stage.after_tokens))
        tokens = before.tokens + (first - before.first) * before.sequence
        spans.append(SampleSpan(first, tokens, stage.sequence))
    return spans


def stage_jobs(job: Job) -> list[StageJob]:
    """The stretches of a run between changes of its samples' length; the first is the job's own."""
    spans, train = sample_spans(job), job.train
    plain = structs.replace(train, sequence_stages=(), batch_ramp=())
    counted = structs.replace(job.data, stages=_counted(job, spans, job.data.sequence))
    first = structs.replace(job, data=counted, train=structs.replace(train, sequence_stages=()))
    jobs = [StageJob(0, first if train.sequence_stages else job)]
    for span, stage in zip(spans[1:], train.sequence_stages, strict=True):
        before = jobs[-1].job
        batch = stage.global_batch or train.global_batch
        micro_batch = stage.micro_batch or train.micro_batch
        scaling = stage.rope_scaling or before.model.rope_scaling
        own = structs.replace(
            job,
            model=structs.replace(job.model, rope_scaling=scaling),
            data=structs.replace(
                job.data, sequence=span.sequence, stages=_counted(job, spans, span.sequence)
            ),
            train=structs.replace(plain, global_batch=batch, micro_batch=micro_batch),
        )
        jobs.append(StageJob(span.first, own))
    return jobs


def _counted(job: Job, spans: list[SampleSpan], sequence: int) -> tuple[Stage, ...]:
    """Stages of the blend at the same samples of the run, in tokens of samples of this length."""
    begins = [span.tokens for span in spans]
    moved = []
    for stage in job.data.stages:
        span = spans[bisect_right(begins, stage.tokens) - 1]
        moved.append(structs.replace(stage, tokens=span.reaches(stage.tokens) * sequence))
    return tuple(moved)


def stage_at(job: Job, samples: int) -> Job:
    """The stretch of a run that holds when it has read so many samples, as a job of its own."""
    return next(stage.job for stage in reversed(stage_jobs(job)) if stage.first <= samples)


def run_tokens(job: Job) -> int:
    """Tokens that all steps of a run read."""
    return sum(stage_tokens(job))


def stage_tokens(job: Job) -> list[int]:
    """Of these, those of each stretch between changes of the samples' length."""
    samples, tokens = batch_ramp(job).samples(job.train.steps), []
    for span in reversed(sample_spans(job)):
        inside = max(0, samples - span.first)
        tokens.append(inside * span.sequence)
        samples -= inside
    return tokens[::-1]


def schedule_span(schedule: Schedule, steps: int) -> int:
    """Steps that the first curve of a schedule spans in a run of so many."""
    following = schedule.extensions[0].at_step if schedule.extensions else steps
    return schedule.steps or following
