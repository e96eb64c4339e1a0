"""Programs of other libraries on Slurm and on Ray: a rank is killed, and they run to their end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from phalanx.testing.slurm.job import SlurmJob
from phalanx.testing.slurm.sandbox import Sandbox
from tests.control.backends.test_ray import needs_namespace, needs_ray, play
from tests.control.programs import (
    LIBRARIES,
    PLAIN,
    SHELL,
    SILENT_SECONDS,
    VARIABLES,
    Program,
    kill_a_rank,
    prepare,
)

PROGRAMS = [*PLAIN, *LIBRARIES, SHELL]
MINUTES = 40
END_SECONDS = 300 + SILENT_SECONDS  # after the kill
PLAY_SECONDS = 600 + END_SECONDS


def words_of(program: Program, folder: Path) -> list[str]:
    """One submission for every engine: each takes what is its own."""
    settings = ("slurm.partition=prod", "slurm.account=research", "ray.cpus_per_node=1")
    return [
        *(word for each in (*settings, "device=cpu") for word in ("--set", f"backend.{each}")),
        *("--minutes", str(MINUTES), "--workdir", str(folder), *VARIABLES),
        *("--world-size", str(program.ranks)),
        *("--slot-gpus", str(program.ranks if program.one_node else 1)),
        *("--", *program.command),
    ]


@pytest.mark.soak
@pytest.mark.timeout(PLAY_SECONDS + 300)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_on_slurm_whose_rank_is_killed_runs_to_its_end(
    program: Program, make_sandbox: Callable[..., Sandbox], tmp_path: Path
) -> None:
    sandbox = make_sandbox(nodes=2, gpus_per_node=2)
    prepare(folder := tmp_path / "program")
    job = SlurmJob(sandbox, tmp_path, program.ranks, *words_of(program, folder))
    kill_a_rank(job, folder)
    asked = {name: job.shown(name) for name in ("Partition", "Account", "TimeLimit")}
    assert asked == {"Partition": "prod", "Account": "research", "TimeLimit": "00:40:00"}
    assert 0 < job.spec()["time_limit_ns"] < MINUTES * 60 * 10**9  # it ends before Slurm ends it
    (folder / "kill-me").unlink()
    assert job.wait_ended(END_SECONDS) == "COMPLETED", job.said()
    assert job.restarts() == 0
    assert program.resumed in job.said() and program.ended in job.said()


@pytest.mark.soak
@pytest.mark.timeout(PLAY_SECONDS + 300)
@needs_ray
@needs_namespace
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_on_ray_whose_rank_is_killed_runs_to_its_end(
    program: Program, tmp_path: Path
) -> None:
    prepare(folder := tmp_path / "program")
    found = play("program", folder, *words_of(program, folder), seconds=PLAY_SECONDS)
    nodes = 1 if program.one_node else program.ranks
    assert found["reserved"] == [1.0] * nodes
    assert found["time_limit_ns"] == MINUTES * 60 * 10**9
    assert program.resumed in found["said"] and program.ended in found["said"]
