"""What a program leaves as its result reaches the agent: whole, its own, and of this generation."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.cluster.pipelines.step_order import RESULT_VARIABLE
from phalanx.cluster.protocol.message_rights import MOST_TEXT
from phalanx.control.agent.jobs.local_job import LocalJob
from phalanx.control.agent.jobs.program_result import left_result, result_variable
from phalanx.control.wire.payload import Script, TrainingWork


@pytest.fixture
def job(tmp_path: Path) -> LocalJob:
    (tmp_path / "work").mkdir()
    made = LocalJob(7, tmp_path, tmp_path / "sockets")
    made.work, made.generation = Script(argv=("x",)), 2
    return made


def test_the_first_rank_of_this_generation_is_heard(job: LocalJob) -> None:
    process, other = job.new_process(0, 0), job.new_process(1, 1)
    process.generation = other.generation = 2
    assert left_result(job, process) == ""
    Path(result_variable(job)[RESULT_VARIABLE]).write_text('{"a": 1}')
    assert left_result(job, process) == '{"a": 1}'
    assert left_result(job, other) == ""
    process.generation = 3
    assert left_result(job, process) == ""
    process.generation, job.work = 2, TrainingWork(toml="", world_size=1)
    assert left_result(job, process) == ""


def test_what_is_too_large_or_no_file_is_nothing(job: LocalJob, tmp_path: Path) -> None:
    process = job.new_process(0, 0)
    process.generation = 2
    path = Path(result_variable(job)[RESULT_VARIABLE])
    path.write_text("x" * (MOST_TEXT + 1))
    assert left_result(job, process) == ""
    path.unlink()
    (tmp_path / "elsewhere").write_text("secret")
    path.symlink_to(tmp_path / "elsewhere")
    assert left_result(job, process) == ""
