"""Numbers that Slurm gives twice, names and lists of nodes that it would read otherwise."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from msgspec import structs
from typer.testing import CliRunner

from phalanx.cli.app import app
from phalanx.config import Backend, ConfigError, Job, Slurm, resolve
from phalanx.control.backends.slurm.accounting import SlurmAllocation, reconciled
from phalanx.control.backends.slurm.facts import expand
from phalanx.control.backends.slurm.programs import SlurmError
from phalanx.control.backends.slurm.script import RUN_FOLDER
from phalanx.control.backends.slurm.submit import SlurmBackend, latest_run, run_folder
from phalanx.control.server.http.submission import RequestedWork
from tests.control.jobs import write_job


def folder_of_turn(runs: Path, restarts: str | None) -> str:
    """The folder that a turn of job 7 takes, by the lines of its script."""
    script = f'set -u; first={runs}/slurm-$SLURM_JOB_ID\n{RUN_FOLDER}\necho "$run"'
    environment = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "7"}
    environment |= {"SLURM_RESTART_COUNT": restarts} if restarts is not None else {}
    done = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    return Path(done.stdout.strip()).name


def test_a_new_job_does_not_go_on_with_the_run_of_one_that_had_its_number(tmp_path: Path) -> None:
    told = [run_folder(7, {path.name for path in tmp_path.iterdir()})]
    taken = [folder_of_turn(tmp_path, None), folder_of_turn(tmp_path, "1")]
    assert taken == [told[0], told[0]] == ["slurm-7", "slurm-7"]
    again = run_folder(7, {path.name for path in tmp_path.iterdir()})
    assert folder_of_turn(tmp_path, "0") == again == "slurm-7.2"
    assert folder_of_turn(tmp_path, "3") == again  # its later turns go on with it
    assert latest_run(tmp_path / "slurm-7") == tmp_path / again
    assert (tmp_path / again / "control").is_dir()
    assert latest_run(tmp_path / "nowhere" / "slurm-7") == tmp_path / "nowhere" / "slurm-7"


def test_a_ledger_with_more_than_slurm_charged_is_of_another_job() -> None:
    turn = SlurmAllocation(state="COMPLETED", start=100, elapsed=10, nodes=1, gpus=8)
    assert reconciled(7, (turn,), {"productive": 81 * 10**9}).ledger_gpu_seconds == 81.0
    with pytest.raises(SlurmError, match="state of another job"):
        reconciled(7, (turn,), {"productive": 331 * 10**9})
    without = structs.replace(turn, counted=False)  # two ranks on a node that Slurm knows no GPU of
    assert reconciled(7, (without,), {"productive": 160 * 10**9}).outside == -80.0


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ("n[1-", "has no ]"),
        ("n[3-1]", "ends before it begins"),
        ("n[a-b]", "no number"),
        ("n[]", "no number"),
        ("n1]", "] without a ["),
        ("n[1-9999999]", "more than 65536 nodes"),
        ("n[1-60000],m[1-60000]", "more than 65536 nodes"),
    ],
)
def test_a_list_of_nodes_that_is_none_is_refused(nodes: str, words: str) -> None:
    with pytest.raises(SlurmError) as refused:
        expand(nodes)
    assert words in str(refused.value)
    backend = Backend(slurm=Slurm(exclude=nodes))
    wanted = RequestedWork(job=resolve(Job(name="a", backend=backend), 1), ranks=1, slot_gpus=1)
    with pytest.raises(ConfigError, match=r"backend\.slurm\.exclude"):
        SlurmBackend().options(wanted)


@pytest.mark.parametrize("engine", ["slurm", "ray", "kubernetes", ""])
@pytest.mark.parametrize("name", ["a\n#SBATCH --wrap=id", "../x", "a/b", ".x"])
def test_a_name_that_no_folder_has_is_refused_by_every_engine(
    tmp_path: Path, engine: str, name: str
) -> None:
    words = ["submit", str(write_job(tmp_path, "tiny")), "--name", name, "--json"]
    words += ["--backend", engine, "--dry-run"] if engine else []
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2, done.output
    assert "--name" in done.output


@pytest.mark.parametrize("name", ["a b", "a%j", "it's"])
def test_a_name_that_slurm_would_change_is_refused(tmp_path: Path, name: str) -> None:
    words = ["submit", str(write_job(tmp_path, "tiny")), "--name", name, "--json"]
    done = CliRunner().invoke(app, [*words, "--backend", "slurm", "--dry-run"])
    assert done.exit_code == 2, done.output
    assert "#SBATCH" in done.output


def test_a_job_given_another_name_has_its_run_in_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["submit", str(write_job(tmp_path, "tiny")), "--name", "two"]
    script = CliRunner().invoke(app, [*words, "--backend", "slurm", "--dry-run"]).output
    assert 'name = "two"' in script and 'name = "tiny"' not in script  # of the checkpoints
    assert f"first={tmp_path}/runs/two/slurm-" in script  # of the controller
