"""What a job that runs would read, and when, once its stages are changed."""

from __future__ import annotations

from msgspec import Struct, structs

from phalanx.config import (
    ConfigError,
    Job,
    StageEdit,
    Stages,
    StageTerms,
    made_before_change,
    stage_rows,
    with_stage,
)

STAGE_KEYS = ("data.stages", "train.sequence_stages")


class ReadSoFar(Struct, frozen=True, kw_only=True):
    """How far a job is in its stages."""

    made: int = 0  # steps, at the latest, when a change that is ordered now takes effect
    skipped: tuple[tuple[int, int], ...] = ()  # samples that were left out
    before: Stages | None = None  # the stages that it had until they were changed; None: never


class StagesAnswer(Struct, frozen=True, kw_only=True):
    """What a run reads when, now and as it would be."""

    now: tuple[StageTerms, ...]
    then: tuple[StageTerms, ...]
    made_before: int  # steps that stay as they are; -1: nothing differs
    safe: int  # steps that are made, at the latest, when a change that is ordered now takes effect


def restaged(job: Job, edit: StageEdit | None, undo: bool, so_far: ReadSoFar) -> Job:
    """The job with what is asked of its stages; ``ConfigError`` where that cannot be."""
    if undo:
        if so_far.before is None:
            fix = "name what is to hold with --after-step"
            raise ConfigError("undo", "true", "the stages of this job were never changed", fix)
        job = so_far.before.put_into(job)
    if edit is None:
        return job
    soonest = edit.after_step or max(1, so_far.made)
    return with_stage(job, structs.replace(edit, after_step=soonest), so_far.skipped)


def stages_answer(job: Job, other: Job, so_far: ReadSoFar) -> StagesAnswer:
    """The stages of a job that runs, beside those that it would have."""
    made = made_before_change(job, other, so_far.skipped)
    return StagesAnswer(
        now=tuple(stage_rows(job, so_far.skipped)),
        then=tuple(stage_rows(other, so_far.skipped)),
        made_before=-1 if made is None else made,
        safe=so_far.made,
    )
