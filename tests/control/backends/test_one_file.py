"""One job file for every engine: what each would get is made from the same lines."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from phalanx.testing.local_cluster import TrialCluster
from phalanx.testing.slurm.job import SlurmJob
from phalanx.testing.slurm.sandbox import Sandbox
from tests.commands import run_phalanx
from tests.control.backends.test_ray import needs_namespace, needs_ray, play
from tests.control.jobs import JOB, assert_same, undisturbed

SITE = """
[backend]
gpus_per_node = 1
spares = 1
image = "registry.example/phalanx@sha256:{digest}"

[backend.slurm]
account = "research"

[backend.kubernetes]
runs_claim = "runs"
"""


def submit(path: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, **environment}
    words = ("submit", "--dry-run", str(path), *words)
    return run_phalanx(*words, environment=given, folder=path.parent)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(JOB.format(name="same", steps=10) + SITE.format(digest="0" * 64))
    return path


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("slurm", ("#SBATCH --nodes=5", "#SBATCH --account=research", "--world-size 4")),
        ("ray", ("STRICT_SPREAD: 4 bundles", "STRICT_SPREAD: 1 of the same as spares")),
        ("kubernetes", ("kind: JobSet", "completions: 5", "claimName: runs")),
    ],
)
def test_every_engine_takes_the_same_file(job: Path, engine: str, words: tuple[str, ...]) -> None:
    done = submit(job, "--backend", engine)
    assert done.returncode == 0, done.stderr
    assert all(word in done.stdout for word in words), done.stdout


def test_a_script_can_be_read_where_there_is_no_slurm(job: Path) -> None:
    done = submit(job, "--backend", "slurm", PATH="")
    assert done.returncode == 0 and "#SBATCH --nodes=5" in done.stdout


def test_an_unknown_engine_is_refused_with_the_nearest(job: Path) -> None:
    done = submit(job, "--backend", "slrum")
    assert done.returncode == 2 and 'did you mean "slurm"?' in done.stderr


def test_settings_that_no_script_can_carry_are_refused(job: Path) -> None:
    for setting, key in (
        ("backend.slurm.account=a b", "backend.slurm.account"),
        ("backend.slurm.options=['rm -rf /']", "backend.slurm.options"),
        ("backend.image=phalanx:latest", "backend.image"),
        ("backend.slurm.array_width=9", "backend.slurm.array_width"),
    ):
        done = submit(job, "--backend", "slurm", "--set", setting)
        assert done.returncode == 2 and key in done.stderr, done.stderr


@pytest.mark.soak
@needs_ray
@needs_namespace
def test_one_file_runs_unchanged_on_this_machine_on_slurm_and_on_ray(
    job: Path, make_sandbox: Callable[..., Sandbox], tmp_path: Path
) -> None:
    expected = undisturbed(tmp_path, 10)
    with TrialCluster(tmp_path / "local", nodes=4) as cluster:
        number = cluster.submit(str(job))
        assert cluster.wait_ended(number, 180) == "done"
    (local,) = (tmp_path / "local" / "runs" / "same").iterdir()
    sandbox = make_sandbox(nodes=5, gpus_per_node=1)
    on_slurm = SlurmJob(sandbox, tmp_path, 4, str(job))
    assert on_slurm.wait_ended(180) == "COMPLETED", on_slurm.said()
    on_ray = play("job", tmp_path, str(job))
    for run in (local, on_slurm.run, Path(on_ray["run"])):
        assert_same(run, expected)
