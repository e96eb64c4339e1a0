"""Blends, curricula and orders that cannot work are refused before any file is opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from phalanx.config import ConfigError, Job, check, explain, load_job, to_toml
from phalanx.config.load import job_from_table

BLEND = {"web": {"path": "a", "weight": 0.7}, "code": {"path": "b", "weight": 0.3}}


def job_with(**data: Any) -> Job:
    settings = {"source": "shards", "sequence": 128, **data}
    return job_from_table({"model": {"preset": "tiny"}, "data": settings})


def problems(**data: Any) -> str:
    try:
        check(job_with(**data), 1)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_blend_with_stages_is_accepted_and_shown_as_it_was_given(tmp_path: Path) -> None:
    stages = [{"tokens": 1000, "weights": {"web": 0.5, "code": 0.5}}]
    job = job_with(blend=BLEND, stages=stages, store={"cache_gb": 3.5})
    check(job, 1)
    assert job.data.blend["code"].weight == 0.3
    path = tmp_path / "job.toml"
    path.write_text(to_toml(job))
    assert load_job(path) == job
    assert load_job(path, ["data.blend.web.weight=2", "data.blend.web.path=7"]).data.blend[
        "web"
    ] == type(job.data.blend["web"])(path="7", weight=2.0)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"blend": BLEND, "path": "x"}, "either one path or a blend"),
        ({"blend": BLEND, "source": "synthetic"}, "reads no files"),
        ({"blend": {"a b": {"path": "x"}}}, "letters, digits"),
        ({"blend": {"web": {"path": ""}}}, "data.blend.web.path"),
        ({"blend": {"web": {"path": "a", "weight": 0}}}, "every weight is zero"),
        ({"blend": {**BLEND, "rare": {"path": "c", "weight": 1e-6}}}, "rare.weight = 1e-06"),
        ({"path": "x", "stages": [{"tokens": 5, "weights": {"web": 1}}]}, "there is none"),
        ({"blend": BLEND, "stages": [{"tokens": 0, "weights": {"web": 1}}]}, "must be above 0"),
        (
            {
                "blend": BLEND,
                "stages": [{"tokens": 9, "weights": {"web": 1}}, {"tokens": 8, "weights": {}}],
            },
            "stages[1].tokens = 8: must be above 9",
        ),
        (
            {"blend": BLEND, "stages": [{"tokens": 9, "weights": {"wib": 1}}]},
            'weights.wib: is no source of data.blend; did you mean "web"',
        ),
        ({"path": "x", "shuffle": "blocked", "block_tokens": 100}, "nearest: 128"),
        ({"path": "s3://bucket/x"}, 'set it to "blocked"'),
        ({"blend": {"a": {"path": "s3://b/x"}}}, "is an object store"),
    ],
)
def test_a_contradiction_is_refused_with_its_reason(data: dict[str, Any], message: str) -> None:
    assert message in problems(**data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"blend": 3}, "data.blend = 3: must be a table of tables"),
        ({"blend": {"web": 3}}, "data.blend.web = 3: must be a table; write [data.blend.web]"),
        (
            {"blend": {"web": {"pth": "x"}}},
            'data.blend.web.pth = "x": is no known key; did you mean "pa',
        ),
        ({"stages": 3}, "data.stages = 3: must be an array of tables"),
        ({"stages": [{"tokens": 1}]}, "data.stages[0].weights: is missing"),
        ({"stages": [{"tokens": 1, "weights": {"a": -1}}]}, "values are a number >= 0"),
        ({"store": {"parallel_reads": 0}}, "data.store.parallel_reads = 0"),
    ],
)
def test_a_mistake_inside_a_table_is_named_by_its_whole_key(
    data: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        job_with(**data)
    assert message in str(error.value)


def test_keys_below_tables_and_arrays_are_explained() -> None:
    assert [doc.key for doc in explain("data.blend")] == [
        "data.blend",
        "data.blend.NAME.path",
        "data.blend.NAME.weight",
    ]
    assert [doc.key for doc in explain("data.stages")][1:] == [
        "data.stages[].tokens",
        "data.stages[].weights",
    ]
