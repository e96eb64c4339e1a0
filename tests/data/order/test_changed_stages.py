"""Stages that are changed in the middle of a run: what is read before the step stays.

Steps are walked as a run walks them, over skipped samples, growing batches and other lengths.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from phalanx.config import (
    ConfigError,
    Job,
    StageEdit,
    batch_ramp,
    check,
    job_from_table,
    made_before_change,
    resolve,
    stage_at,
    with_stage,
)
from phalanx.data import Cursor
from phalanx.data.order.curriculum import curriculum

STEPS = 24
Read = list[tuple[int, int, int, int]]  # of each sample: number, length, source, draw of it


def walked(job: Job, skipped: tuple[tuple[int, int], ...]) -> list[Read]:
    """What each step of a run reads."""
    ramp, cursor, steps = batch_ramp(job), Cursor(skipped=skipped), []
    for _ in range(STEPS):
        stage = stage_at(job, cursor.seen)
        numbers = [int(each) for each in cursor.upcoming(0, ramp.at(cursor.seen))]
        order = curriculum(stage.data)
        read: Read = []
        for number in numbers:
            which, draw = (int(each[0]) for each in order.locate(np.array([number])))
            read.append((number, stage.data.sequence, which, draw))
        steps.append(read)
        cursor = cursor.advance(len(numbers))
    return steps


def job_of(batch: int, ramp: list[Any], stages: list[Any], mixture: list[Any]) -> Job:
    blend = {name: {"path": f"/{name}", "weight": 1.0} for name in "ab"}
    table = {
        "model": {"preset": "tiny"},
        "data": {"source": "shards", "sequence": 8, "blend": blend, "stages": mixture},
        "train": {
            "steps": STEPS,
            "global_batch": batch,
            "batch_ramp": ramp,
            "sequence_stages": stages,
        },
    }
    job = resolve(job_from_table(table), 1)
    check(job, 1)
    return job


@st.composite
def runs(draw: st.DrawFn) -> tuple[Job, tuple[tuple[int, int], ...]]:
    batch = draw(st.integers(1, 6))
    ramp = [{"until_tokens": draw(st.integers(1, 150)), "global_batch": draw(st.integers(1, 4))}]
    begins = sorted(draw(st.sets(st.integers(160, 1200), max_size=2)))
    sizes = [{"after_tokens": at, "sequence": draw(st.sampled_from([8, 16, 24]))} for at in begins]
    mixed = sorted(draw(st.sets(st.integers(1, 1200), max_size=2)))
    mixture = [{"tokens": at, "weights": {"a": draw(st.integers(1, 3))}} for at in mixed]
    edges = sorted(draw(st.sets(st.integers(0, 90), max_size=4)))
    skipped = tuple(zip(edges[::2], edges[1::2], strict=False))
    ramps = ramp if draw(st.booleans()) else []
    try:
        return job_of(batch, ramps, sizes, mixture), skipped
    except ConfigError:
        assume(False)
        raise


@given(runs(), st.data())
def test_all_steps_up_to_the_one_that_is_named_read_what_they_did(
    run: tuple[Job, tuple[tuple[int, int], ...]], data: st.DataObject
) -> None:
    job, skipped = run
    step = data.draw(st.integers(1, STEPS - 1))
    edit = StageEdit(
        after_step=step,
        weights=data.draw(st.sampled_from([{}, {"b": 1.0}, {"a": 1.0, "b": 5.0}])),
        sequence=data.draw(st.sampled_from([0, 32])),
        global_batch=data.draw(st.sampled_from([0, 3])),
    )
    assume(edit.weights or edit.changes_samples)
    changed = with_stage(job, edit, skipped)
    try:
        check(changed, 1)
    except ConfigError:
        assume(False)  # within the ramp, or two stages that begin with one sample
    before, after = walked(job, skipped), walked(changed, skipped)
    assert after[:step] == before[:step]
    first = after[step]
    if edit.sequence:
        assert {length for _, length, _, _ in first} == {32}
    if edit.global_batch:
        assert len(first) == 3
    if edit.weights == {"b": 1.0}:
        assert first[0][2] == 1, "another mixture may begin within the step"
    made = made_before_change(job, changed, skipped)
    assert made in (None, step)


@given(runs(), st.data())
def test_a_draw_of_a_source_is_read_once_in_samples_of_one_length(
    run: tuple[Job, tuple[tuple[int, int], ...]], data: st.DataObject
) -> None:
    job, skipped = run
    step = data.draw(st.integers(1, STEPS - 1))
    changed = with_stage(job, StageEdit(after_step=step, weights={"b": 1.0, "a": 2.0}), skipped)
    try:
        check(changed, 1)
    except ConfigError:
        assume(False)
    reads = [each[1:] for read in walked(changed, skipped) for each in read]
    assert len(reads) == len(set(reads))
