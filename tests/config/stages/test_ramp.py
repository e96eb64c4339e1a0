"""Stages of a run: where they begin, and what each is as a job of its own."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from phalanx.config import (
    ConfigError,
    Job,
    batch_ramp,
    check,
    job_from_table,
    resolve,
    run_tokens,
    sample_spans,
    stage_at,
    stage_jobs,
    to_toml,
)

YARN = {"kind": "yarn", "factor": 2.0, "original_context": 32}
STAGES = [
    {"after_tokens": 1000, "sequence": 64, "global_batch": 4, "rope_scaling": YARN},
    {"after_tokens": 3000, "sequence": 128, "micro_batch": 2},
]


def staged(**sections: dict[str, Any]) -> Job:
    table: dict[str, Any] = {
        "model": {"preset": "tiny"},
        "data": {"sequence": 32},
        "train": {"steps": 20, "global_batch": 8, "sequence_stages": STAGES},
    }
    for name, values in sections.items():
        table[name] = {**table.get(name, {}), **values}
    job = resolve(job_from_table(table), 1)
    check(job, 1)
    return job


def test_a_stage_begins_with_the_sample_that_reaches_its_tokens() -> None:
    assert [tuple(span) for span in sample_spans(staged())] == [
        (0, 0, 32),
        (32, 1024, 64),
        (63, 3008, 128),
    ]
    assert batch_ramp(staged()) == ((32, 63), (8, 4, 8))


def test_each_stage_is_a_job_without_stages() -> None:
    jobs = [stage.job for stage in stage_jobs(staged())]
    assert [job.data.sequence for job in jobs] == [32, 64, 128]
    assert [job.train.global_batch for job in jobs] == [8, 4, 8]
    assert [job.train.micro_batch for job in jobs] == [1, 1, 2]
    assert all(job.train.sequence_stages == () for job in jobs)
    factors = [job.model.rope_scaling and job.model.rope_scaling.factor for job in jobs]
    assert factors == [None, 2.0, 2.0], "a scaling holds until another one is given"


def test_stages_are_the_same_after_they_were_written_down() -> None:
    assert job_from_table(tomllib.loads(to_toml(staged()))) == staged()


def test_a_job_without_stages_is_its_only_stage() -> None:
    job = resolve(job_from_table({"model": {"preset": "tiny"}}), 1)
    ((first, only),) = stage_jobs(job)
    assert first == 0 and only is job


@pytest.mark.parametrize(("samples", "length"), [(0, 32), (31, 32), (32, 64), (62, 64), (63, 128)])
def test_the_stage_of_a_run_follows_from_its_samples(samples: int, length: int) -> None:
    assert stage_at(staged(), samples).data.sequence == length


def test_tokens_of_a_run_count_the_length_of_its_samples() -> None:
    samples = batch_ramp(staged()).samples(20)  # 4 steps of 8, 8 of 4, 8 of 8
    assert samples == 32 + 32 + 64
    assert run_tokens(staged()) == 32 * 32 + 31 * 64 + 65 * 128
    assert run_tokens(staged(train={"sequence_stages": []})) == 20 * 8 * 32


def test_the_blend_changes_after_the_same_samples_in_every_stage() -> None:
    blend = {name: {"path": f"/{name}", "weight": 1.0} for name in "ab"}
    changes = [{"tokens": tokens, "weights": {"a": 1.0}} for tokens in (320, 1664, 4032)]
    data = {"source": "shards", "blend": blend, "stages": changes}
    jobs = stage_jobs(staged(data=data))
    assert [stage.tokens // 32 for stage in jobs[0].job.data.stages] == [10, 42, 71]
    assert [stage.tokens // 64 for stage in jobs[1].job.data.stages] == [10, 42, 71]
    assert [stage.tokens // 128 for stage in jobs[2].job.data.stages] == [10, 42, 71]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"train": {"sequence_stages": STAGES[::-1]}},
            r"sequence_stages\[1\].after_tokens = 1000: must be above 3000",
        ),
        (
            {"train": {"batch_ramp": [{"until_tokens": 2000, "global_batch": 4}]}},
            r"sequence_stages\[0\].after_tokens = 1000: must be above 2000.*batch_ramp ends",
        ),
        (
            {"train": {"sequence_stages": [{**STAGES[0], "micro_batch": 16}]}},
            r"in train.sequence_stages\[0\], train.micro_batch = 16: must be at most",
        ),
        ({"parallel": {"choose": True}}, "the planner looks at samples of one length"),
    ],
)
def test_impossible_stages_are_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        staged(**sections)
