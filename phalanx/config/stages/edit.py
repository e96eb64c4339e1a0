"""Stages of a run that has begun: what holds after which step, changed, and from which step on.

A stage is a length of samples (``train.sequence_stages``) or a mixture (``data.stages``). Job files
give their beginnings in tokens; people who look at a run that trains know its steps.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import zip_longest

from msgspec import Struct, structs

from phalanx.config.errors import ConfigError
from phalanx.config.load import overridden
from phalanx.config.schema import Job, RopeScaling, SequenceStage, Stage
from phalanx.config.stages.ramp import SampleSpan, batch_ramp, sample_spans, stage_at
from phalanx.config.tree import build, mistakes

Ranges = Sequence[tuple[int, int]]  # of sample numbers that were left out, sorted and apart


class StageEdit(Struct, frozen=True, kw_only=True):
    """What is to hold after a step; what is left out stays as it is there."""

    after_step: int
    weights: dict[str, float] = {}  # of all sources that are drawn from
    sequence: int = 0
    global_batch: int = 0
    micro_batch: int = 0
    rope_scaling: tuple[str, ...] = ()  # key=value
    remove: bool = False  # the stages that begin there

    @property
    def changes_samples(self) -> bool:
        """Whether it says anything of the samples' length, and so of ``sequence_stages``."""
        numbers = self.sequence or self.global_batch or self.micro_batch
        return bool(numbers or self.rope_scaling)


class StageTerms(Struct, frozen=True, kw_only=True):
    """What holds after a step, until the next row."""

    after_step: int
    sequence: int
    global_batch: int
    rope_scaling: str = ""  # in words; "": none
    weights: dict[str, float] = {}  # of the sources that are drawn from

    def __str__(self) -> str:
        words = [f"samples of {self.sequence:,} tokens, {self.global_batch:,} a step"]
        words += [self.rope_scaling, " ".join(f"{n}={w:g}" for n, w in self.weights.items())]
        return "; ".join(each for each in words if each)


class Stages(Struct, frozen=True):
    """The stages of a job, to be put in the place of others."""

    mixture: tuple[Stage, ...] = ()
    samples: tuple[SequenceStage, ...] = ()

    @classmethod
    def of(cls, job: Job) -> Stages:
        """Those that a job has."""
        return cls(job.data.stages, job.train.sequence_stages)

    def put_into(self, job: Job) -> Job:
        """The job with these and no others."""
        data = structs.replace(job.data, stages=self.mixture)
        train = structs.replace(job.train, sequence_stages=self.samples)
        return structs.replace(job, data=data, train=train)


def with_stage(job: Job, edit: StageEdit, skipped: Ranges = ()) -> Job:
    """The job with a stage begun, changed or removed; ``ConfigError`` where that says nothing."""
    if not 0 < edit.after_step < job.train.steps:
        rule = f"must be above 0 and below train.steps ({job.train.steps:,}), where the run ends"
        raise ConfigError("after_step", edit.after_step, rule, "name a step that is still to come")
    if edit.remove:
        return _same_mixtures(job, _without_stage(job, edit, skipped), edit.after_step, skipped)
    if not edit.weights and not edit.changes_samples:
        fix = "give weights, sequence, global_batch, micro_batch or rope_scaling"
        raise ConfigError("after_step", edit.after_step, "nothing is to change there", fix)
    if edit.changes_samples:
        job = _same_mixtures(job, _with_samples(job, edit), edit.after_step, skipped)
    return _with_weights(job, edit, skipped) if edit.weights else job


def stage_rows(job: Job, skipped: Ranges = ()) -> list[StageTerms]:
    """What holds when, by steps; the first row is the beginning of the run."""
    ramp, spans = batch_ramp(job), sample_spans(job)
    mixtures = [(_made_before(job, number, skipped), w) for number, w in _mixtures(job, spans)]
    begins = {0, *(made for made, _ in mixtures)}
    begins |= {ramp.steps_reaching(edge) for edge in ramp.edges}
    rows = []
    for step in sorted(each for each in begins if each < job.train.steps):
        stage = stage_at(job, read := ramp.samples(step))
        weights = mixtures[bisect_right([made for made, _ in mixtures], step) - 1][1]
        row = StageTerms(
            after_step=step,
            sequence=stage.data.sequence,
            global_batch=ramp.at(read),
            rope_scaling=_in_words(stage.model.rope_scaling),
            weights=weights,
        )
        rows.append(row)
    return rows


def made_before_change(before: Job, after: Job, skipped: Ranges = ()) -> int | None:
    """Steps that come before the first one that other stages alter; None: they alter none.

    How many samples a forward pass takes decides nothing of what a run reads.
    """
    spans = sample_spans(before), sample_spans(after)
    mixtures = zip_longest(_mixtures(before, spans[0]), _mixtures(after, spans[1]))
    samples = zip_longest(_samples(before, spans[0]), _samples(after, spans[1]))
    altered = [
        _made_before(before, min(each[0] for each in pair if each is not None), skipped)
        for pair in mixtures
        if pair[0] != pair[1]
    ]
    altered += [
        batch_ramp(before).steps_reaching(min(each[0] for each in pair if each is not None))
        for pair in samples
        if pair[0] != pair[1]
    ]
    return min(altered, default=None)


def changed_rows(before: Iterable[StageTerms], after: Iterable[StageTerms]) -> tuple[str, ...]:
    """What differs, in words."""
    earlier = {row.after_step: row for row in before}
    later = {row.after_step: row for row in after}
    changed = (row for step, row in later.items() if row != earlier.get(step))
    lines = [f"after step {row.after_step:,}: {row}" for row in changed]
    gone = [step for step in earlier if step not in later]
    return (*lines, *(f"after step {step:,}: nothing changes any more" for step in gone))


def _with_samples(job: Job, edit: StageEdit) -> Job:
    ramp, spans, stages = batch_ramp(job), sample_spans(job), list(job.train.sequence_stages)
    read = ramp.samples(edit.after_step)
    begins = [ramp.steps_reaching(span.first) for span in spans[1:]]
    at = bisect_left(begins, edit.after_step)
    if at < len(begins) and begins[at] == edit.after_step:
        stage = stages.pop(at)
    else:
        holds = stage_at(job, read)
        stage = SequenceStage(
            after_tokens=spans[at].tokens_before(read),
            sequence=holds.data.sequence,
            global_batch=ramp.at(read),
            micro_batch=holds.train.micro_batch,
        )
    asked = {name: getattr(edit, name) for name in ("sequence", "global_batch", "micro_batch")}
    changes: dict[str, object] = {name: value for name, value in asked.items() if value}
    if edit.rope_scaling:
        changes["rope_scaling"] = _rope_scaling(edit.rope_scaling)
    stages.insert(at, structs.replace(stage, **changes))
    return Stages(job.data.stages, tuple(stages)).put_into(job)


def _with_weights(job: Job, edit: StageEdit, skipped: Ranges) -> Job:
    spans, stages = sample_spans(job), job.data.stages
    number = _number(batch_ramp(job).samples(edit.after_step), skipped)
    others = [each for each in stages if _first_number(each, spans) != number]
    added = Stage(tokens=_tokens_before(number, spans), weights=edit.weights)
    mixture = tuple(sorted([*others, added], key=lambda each: each.tokens))
    return Stages(mixture, job.train.sequence_stages).put_into(job)


def _without_stage(job: Job, edit: StageEdit, skipped: Ranges) -> Job:
    ramp, spans, step = batch_ramp(job), sample_spans(job), edit.after_step
    mixture = [
        (_made_before(job, _first_number(each, spans), skipped), each) for each in job.data.stages
    ]
    samples = [
        (ramp.steps_reaching(span.first), each)
        for span, each in zip(spans[1:], job.train.sequence_stages, strict=True)
    ]
    begins = sorted({*(made for made, _ in mixture), *(made for made, _ in samples)})
    if step not in begins:
        steps = ", ".join(f"{each:,}" for each in begins)
        fix = f"stages begin after step {steps}" if steps else "the job has no stages"
        raise ConfigError("after_step", step, "no stage begins there", fix)
    return Stages(
        tuple(each for made, each in mixture if made != step),
        tuple(each for made, each in samples if made != step),
    ).put_into(job)


def _same_mixtures(before: Job, after: Job, step: int, skipped: Ranges) -> Job:
    """The job with mixtures that begin with the same samples as before where a step has not come.

    Skipped samples count among the numbers that mixtures begin with, and not among those that a
    length begins with: the same tokens would mean another number.
    """
    number = _number(batch_ramp(before).samples(step), skipped)
    old, new = sample_spans(before), sample_spans(after)
    later = _tokens_before(number, new) - _tokens_before(number, old)
    mixture = []
    for stage in after.data.stages:
        first, tokens = _first_number(stage, old), stage.tokens + later
        if first <= number:
            same = _first_number(stage, new) == first
            tokens = stage.tokens if same else _tokens_before(first, new)
        mixture.append(structs.replace(stage, tokens=tokens))
    return Stages(tuple(mixture), after.train.sequence_stages).put_into(after)


def _tokens_before(number: int, spans: list[SampleSpan]) -> int:
    span = spans[bisect_right([each.first for each in spans], number) - 1]
    return span.tokens_before(number)


def _rope_scaling(settings: tuple[str, ...]) -> RopeScaling:
    table, problems = overridden({}, settings, RopeScaling)
    problems = problems or mistakes(RopeScaling, table)
    if problems:
        key = "rope_scaling"
        raise ConfigError.of(structs.replace(each, key=f"{key}.{each.key}") for each in problems)
    return build(RopeScaling, table)


def _mixtures(job: Job, spans: list[SampleSpan]) -> list[tuple[int, dict[str, float]]]:
    """From which sample number on sources are drawn from with which weights."""
    weights = {name: source.weight for name, source in job.data.blend.items() if source.weight}
    begins = {0: weights}
    for stage in job.data.stages:  # of two that begin with one sample the later one holds
        drawn = {name: share for name, share in stage.weights.items() if share}
        begins[_first_number(stage, spans)] = drawn
    return list(begins.items())


def _samples(job: Job, spans: list[SampleSpan]) -> list[tuple[int, object]]:
    """From which sample read on samples have which form."""
    return [
        (span.first, (span.sequence, stage.global_batch, stage.rope_scaling))
        for span, stage in zip(spans[1:], job.train.sequence_stages, strict=True)
    ]


def _first_number(stage: Stage, spans: list[SampleSpan]) -> int:
    begins = [span.tokens for span in spans]
    return spans[bisect_right(begins, stage.tokens) - 1].reaches(stage.tokens)


def _made_before(job: Job, number: int, skipped: Ranges) -> int:
    """Steps that come before the one that reads a sample number."""
    read = number - sum(min(past, number) - first for first, past in skipped if first < number)
    return batch_ramp(job).steps_within(read)


def _number(read: int, skipped: Ranges) -> int:
    """Number of the sample that is read next by a run that has read so many."""
    for first, past in skipped:
        if read >= first:
            read += past - first
    return read


def _in_words(scaling: RopeScaling | None) -> str:
    return f"{scaling.kind} x{scaling.factor:g}" if scaling is not None else ""
