"""Stages of a run that has begun: added, altered and removed at steps, and what that alters."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.config import (
    ConfigError,
    Job,
    StageEdit,
    Stages,
    batch_ramp,
    changed_rows,
    check,
    job_from_table,
    made_before_change,
    resolve,
    stage_at,
    stage_jobs,
    stage_rows,
    with_stage,
)

BLEND = {name: {"path": f"/{name}", "weight": float(name != "c")} for name in "abc"}


def run(stages: tuple[Any, ...] = (), mixture: tuple[Any, ...] = (), **train: Any) -> Job:
    """A run of 100 steps of 8 samples of 32 tokens; ``c`` is drawn from by no stage of its own."""
    table = {
        "model": {"preset": "tiny"},
        "data": {"source": "shards", "sequence": 32, "blend": BLEND, "stages": list(mixture)},
        "train": {"steps": 100, "global_batch": 8, "sequence_stages": list(stages), **train},
    }
    return resolve(job_from_table(table), 1)


def shapes(job: Job) -> list[tuple[int, int, int]]:
    return [(row.after_step, row.sequence, row.global_batch) for row in stage_rows(job)]


def weights(job: Job) -> list[tuple[int, dict[str, float]]]:
    return [(row.after_step, row.weights) for row in stage_rows(job)]


def test_longer_samples_begin_after_the_step_that_is_named() -> None:
    yarn = ("kind=yarn", "factor=4", "original_context=32")
    edit = StageEdit(after_step=50, sequence=128, global_batch=2, rope_scaling=yarn)
    job = with_stage(run(), edit)
    check(job, 1)
    assert shapes(job) == [(0, 32, 8), (50, 128, 2)]
    assert job.train.sequence_stages[0].after_tokens == 50 * 8 * 32
    assert [stage.first for stage in stage_jobs(job)] == [0, 400]
    assert changed_rows(stage_rows(run()), stage_rows(job)) == (
        "after step 50: samples of 128 tokens, 2 a step; yarn x4; a=1 b=1",
    )
    assert made_before_change(run(), job) == 50


def test_a_later_stage_keeps_what_the_edit_leaves_out() -> None:
    job = with_stage(run(), StageEdit(after_step=50, sequence=64, global_batch=4, micro_batch=2))
    job = with_stage(job, StageEdit(after_step=70, sequence=128))
    check(job, 1)
    assert shapes(job) == [(0, 32, 8), (50, 64, 4), (70, 128, 4)]
    last = stage_at(job, batch_ramp(job).samples(70))
    assert (last.train.micro_batch, last.data.sequence) == (2, 128)
    between = with_stage(job, StageEdit(after_step=60, global_batch=2))
    assert shapes(between)[:3] == [(0, 32, 8), (50, 64, 4), (60, 64, 2)]
    assert made_before_change(job, between) == 60


def test_a_stage_that_begins_there_is_altered() -> None:
    job = with_stage(run(), StageEdit(after_step=50, sequence=64, global_batch=4))
    again = with_stage(job, StageEdit(after_step=50, sequence=128))
    assert shapes(again) == [(0, 32, 8), (50, 128, 4)]
    assert made_before_change(job, again) == 50
    mixed = with_stage(again, StageEdit(after_step=50, weights={"c": 1.0}))
    other = with_stage(mixed, StageEdit(after_step=50, weights={"a": 1.0}))
    assert weights(other) == [(0, {"a": 1.0, "b": 1.0}), (50, {"a": 1.0})]


def test_a_mixture_changes_at_the_boundary_in_any_stage() -> None:
    job = with_stage(run(), StageEdit(after_step=40, sequence=64, global_batch=4))
    for step in (20, 40, 60):
        mixed = with_stage(job, StageEdit(after_step=step, weights={"a": 1.0, "c": 3.0}))
        check(mixed, 1)
        held = next(row.weights for row in stage_rows(mixed) if row.after_step == step)
        assert held == {"a": 1.0, "c": 3.0} and made_before_change(job, mixed) == step
        stage = stage_at(mixed, batch_ramp(mixed).samples(step))
        first = stage.data.stages[-1].tokens // stage.data.sequence
        assert first == batch_ramp(mixed).samples(step), "in samples of the stage it falls into"


def test_samples_that_were_left_out_move_a_mixture_to_its_step() -> None:
    skipped = ((80, 88), (160, 176))
    edit = StageEdit(after_step=30, weights={"c": 1.0})
    job = with_stage(run(), edit, skipped)
    assert job.data.stages[0].tokens == (30 * 8 + 24) * 32
    assert stage_rows(job, skipped)[1].after_step == 30
    assert made_before_change(run(), job, skipped) == 30
    earlier = with_stage(run(), StageEdit(after_step=9, weights={"c": 1.0}), skipped)
    assert earlier.data.stages[0].tokens == 9 * 8 * 32
    assert made_before_change(run(), earlier, skipped) == 9


def test_stages_that_begin_there_are_removed() -> None:
    edits = [
        StageEdit(after_step=20, weights={"a": 1.0}),
        StageEdit(after_step=40, sequence=64, weights={"b": 1.0}),
    ]
    job = run()
    for edit in edits:
        job = with_stage(job, edit)
    gone = with_stage(job, StageEdit(after_step=40, remove=True))
    assert gone == with_stage(run(), edits[0])
    assert made_before_change(job, gone) == 40
    assert changed_rows(stage_rows(job), stage_rows(gone)) == (
        "after step 40: nothing changes any more",
    )
    with pytest.raises(ConfigError, match=r"no stage begins there; .*after step 20, 40"):
        with_stage(job, StageEdit(after_step=41, remove=True))
    with pytest.raises(ConfigError, match="the job has no stages"):
        with_stage(run(), StageEdit(after_step=41, remove=True))


def test_the_stages_of_before_are_put_back() -> None:
    job = with_stage(run(), StageEdit(after_step=40, sequence=64, weights={"b": 1.0}))
    assert Stages.of(run()).put_into(job) == run()
    assert made_before_change(job, run()) == 40
    assert made_before_change(job, job) is None


def test_a_begun_stage_written_by_hand_counts_from_its_first_sample() -> None:
    job = run(stages=({"after_tokens": 10_000, "sequence": 64},))  # sample 313: after step 40
    assert shapes(job) == [(0, 32, 8), (40, 64, 8)]
    shorter = run(stages=({"after_tokens": 9_000, "sequence": 64},))
    assert made_before_change(job, shorter) == 36
    mixed = run(mixture=({"tokens": 300, "weights": {"a": 1.0}},))  # sample 10, in the second step
    assert made_before_change(run(), mixed) == 1


def test_only_what_decides_the_order_counts_as_altered() -> None:
    job = with_stage(run(), StageEdit(after_step=40, sequence=64, micro_batch=1))
    assert made_before_change(job, with_stage(job, StageEdit(after_step=40, micro_batch=2))) is None
    assert made_before_change(run(), run(micro_batch=2)) is None


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (StageEdit(after_step=0, sequence=64), "after_step = 0: must be above 0 and below"),
        (StageEdit(after_step=100, sequence=64), "after_step = 100: must be above 0 and below"),
        (StageEdit(after_step=50), "nothing is to change there; give weights"),
        (StageEdit(after_step=50, rope_scaling=("factr=4",)), "rope_scaling.factr"),
        (StageEdit(after_step=50, rope_scaling=("kind=magic",)), "rope_scaling.kind"),
        (StageEdit(after_step=50, weights={"d": 1.0}), r"data.stages\[0\].weights.d"),
        (StageEdit(after_step=50, weights={"a": 0.0}), "every weight is zero"),
        (StageEdit(after_step=50, sequence=64, micro_batch=16), "must be at most"),
    ],
    ids=str,
)
def test_what_cannot_be_is_named(edit: StageEdit, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(with_stage(run(), edit), 1)


def test_a_stage_within_the_batch_ramp_is_refused() -> None:
    ramp = [{"until_tokens": 12_800, "global_batch": 4}]
    job = run(batch_ramp=ramp)
    with pytest.raises(ConfigError, match="batch_ramp ends"):
        check(with_stage(job, StageEdit(after_step=50, sequence=64)), 1)
    later = with_stage(job, StageEdit(after_step=99, weights={"a": 1.0}))
    assert made_before_change(job, later) == 99


@given(st.data())
def test_a_ramp_counts_steps_both_ways(data: st.DataObject) -> None:
    batches = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    gaps = data.draw(st.lists(st.integers(1, 40), min_size=len(batches), max_size=len(batches)))
    edges = tuple(sum(gaps[: n + 1]) for n in range(len(batches)))
    ramp = batch_ramp(run())._replace(edges=edges, batches=(*batches, 7))
    samples = data.draw(st.integers(0, 300))
    within, reaching = ramp.steps_within(samples), ramp.steps_reaching(samples)
    assert ramp.samples(within) <= samples < ramp.samples(within + 1)
    assert ramp.samples(reaching) >= samples and (
        not reaching or ramp.samples(reaching - 1) < samples
    )
