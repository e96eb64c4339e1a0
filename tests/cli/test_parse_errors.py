"""Values and files in the wrong place are told where they belong, in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from phalanx.cli.app import app
from phalanx.cli.job_file import missing_corpora
from phalanx.config import job_from_table


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("up --port abc", "'abc' is not a whole number, e.g. 7070"),
        ("up --port 99999", "99999 must be at most 65535"),
        ("ckpt export a b --to gguf", "'--to': 'gguf' is not one of 'hf', 'dcp'"),
        ("ckpt prune runs --quota-gb inf", "inf is no finite number"),
        ("tune job.toml --minutes 1e999", "inf is no finite number"),
        ("budget 1 --dollars nan", "nan is no finite number"),
        ("plan job.toml", "`phalanx plan --model job.toml --cluster h100-8` plans a job file"),
        ("plan runs.csv", "`phalanx plan check runs.csv` compares a table of runs"),
        ("sweep lr.toml", "`phalanx sweep run lr.toml` runs its trials"),
        ("sweep lr.csv", "a sweep is described in TOML"),
    ],
)
def test_what_stands_in_the_wrong_place_is_told_where_it_belongs(typed: str, said: str) -> None:
    result = CliRunner().invoke(app, typed.split(), env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert said in result.output


def test_a_corpus_that_is_not_here_is_named_with_the_folder_that_it_was_looked_for_in(
    tmp_path: Path,
) -> None:
    (tmp_path / "there").mkdir()
    blend = {"web": {"path": "there", "weight": 1.0}, "code": {"path": "gone", "weight": 1.0}}
    table = {"name": "x", "model": {"preset": "tiny"}, "train": {"steps": 1}}
    job = job_from_table(table | {"data": {"source": "shards", "blend": blend}}, ())
    (line,) = missing_corpora(job, str(tmp_path))
    assert line.startswith(f"data.blend.code.path = gone: is not on this machine (from {tmp_path})")
    remote = job_from_table(table | {"data": {"source": "shards", "path": "s3://b/c"}}, ())
    assert missing_corpora(remote, str(tmp_path)) == missing_corpora(None, "") == []
