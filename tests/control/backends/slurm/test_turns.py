"""A job through several allocations: warned, requeued, preempted, drained, and never set back."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from phalanx.testing.slurm import files as sandbox_files
from phalanx.testing.slurm.job import SlurmJob
from phalanx.testing.slurm.sandbox import Sandbox
from phalanx.train import StepRecord, read_records
from tests.control.jobs import assert_same, generations, undisturbed, write_job

SMALL = ("--slot-gpus", "1")
END_SECONDS = 420


def repeated(job: SlurmJob) -> int:
    """Steps that were made more than once."""
    records = list(read_records(job.run / "metrics" / "steps.jsonl", StepRecord))
    return len(records) - len({record.step for record in records})


def say_warned(job: SlurmJob) -> None:
    """What Slurm sends the script before its time limit."""
    job.sandbox.run("scancel", "--batch", "--signal=USR1", str(job.number))


def test_a_drained_node_is_left_at_a_step_boundary_and_a_cancelled_job_leaves_nothing(
    make_sandbox: Callable[..., Sandbox], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_CHAOS", "1")  # workers let themselves be slowed down
    sandbox = make_sandbox(nodes=3, gpus_per_node=1)
    path = write_job(tmp_path, "moved", 100_000)  # it does not end before it is looked at
    path.write_text(path.read_text().replace("pipeline = 2", "pipeline = 1"))
    job = SlurmJob(sandbox, tmp_path, 2, str(path), *SMALL, "--spares", "1")
    job.wait_running()
    job.pace(0.1)  # it is only looked at
    job.reach(job.commits(), 5)
    left = next(name for name in job.job()["nodes"] if name != job.protected())
    sandbox.run("scontrol", "update", f"nodename={left}", "state=drain", "reason=bad fan")
    job.wait(lambda: left not in job.job().get("nodes", [left]), "the job to leave the node")
    known = job.client.get("/v1/nodes", dict)["nodes"]
    why = {node["name"]: node["why"]["text"] for node in known}
    assert why[left] == "a person wants it empty: bad fan"
    records = job.run / "metrics" / "steps.jsonl"
    elsewhere = lambda: records.exists() and 2 in generations(job.run).values()  # noqa: E731
    job.wait(elsewhere, "steps elsewhere")
    assert job.restarts() == 0
    assert set(generations(job.run).values()) == {1, 2}
    assert repeated(job) <= 1
    sandbox.run("scancel", str(job.number))
    assert job.wait_ended(300) == "CANCELLED"
    job.wait(lambda: not sandbox.job_processes(), "its processes to end", 60)
    assert job.restarts() == 0
    assert job.sockets_left() == []


@pytest.mark.soak
def test_a_warned_job_continues_in_its_next_allocation(
    make_sandbox: Callable[..., Sandbox], tmp_path: Path
) -> None:
    sandbox = make_sandbox(nodes=4, gpus_per_node=1)
    expected = undisturbed(tmp_path, 300)
    job = SlurmJob(sandbox, tmp_path, 4, str(write_job(tmp_path, "warned", 300)), *SMALL)
    for turn in range(1, 3):  # three allocations in all
        job.wait(lambda turn=turn: job.job().get("generation", 0) >= turn, "its turn")  # type: ignore[misc]
        job.wait_running()
        job.reach(job.commits(), 60 * turn)
        say_warned(job)
        job.wait(lambda turn=turn: job.restarts() == turn, "to be requeued", 60)  # type: ignore[misc]
    assert job.wait_ended(END_SECONDS) == "COMPLETED"
    assert set(generations(job.run).values()) == {1, 2, 3}
    assert repeated(job) == 0
    assert_same(job.run, expected)


@pytest.mark.soak
def test_a_preempted_job_saves_itself_within_the_grace(
    make_sandbox: Callable[..., Sandbox], tmp_path: Path
) -> None:
    sandbox = make_sandbox(nodes=4, gpus_per_node=1, grace_seconds=20)
    expected = undisturbed(tmp_path, 300)
    job = SlurmJob(sandbox, tmp_path, 4, str(write_job(tmp_path, "preempted", 300)), *SMALL)
    job.wait_running()
    job.reach(job.commits(), 20)
    sandbox.run("sbatch", "--partition=prod", "--nodes=4", "--output=/dev/null", "--wrap=sleep 5")
    job.wait(lambda: job.restarts() == 1, "to be requeued", 60)
    assert "is on disk" in job.output.read_text()
    assert job.wait_ended(END_SECONDS) == "COMPLETED"
    assert set(generations(job.run).values()) == {1, 2}
    assert repeated(job) <= 1
    assert_same(job.run, expected)


@pytest.mark.soak
def test_a_time_limit_is_only_the_end_of_a_turn(
    make_sandbox: Callable[..., Sandbox], tmp_path: Path
) -> None:
    """Slurm's own limit and signal, through three allocations of a minute each."""
    sandbox = make_sandbox(nodes=4, gpus_per_node=1)
    steps = 4000
    path = write_job(tmp_path, "limited", steps)
    path.write_text(
        path.read_text() + "\n[backend]\nhours = 0.03\n[backend.slurm]\nsignal_seconds = 60\n"
    )
    job = SlurmJob(sandbox, tmp_path, 4, str(path), *SMALL)
    deadline = time.monotonic() + END_SECONDS
    while job.restarts() < 2 and time.monotonic() < deadline:
        time.sleep(1)
    job.wait(lambda: job.job().get("generation", 0) >= 3, "its third turn", 120)
    job.wait_running()
    job.reach(job.commits(), 1)
    sandbox.run("scancel", str(job.number))
    made_by = generations(job.run)
    assert set(made_by.values()) >= {1, 2}
    assert repeated(job) <= 1


@pytest.mark.soak
def test_a_job_whose_script_dies_with_its_node_is_requeued_and_goes_on(
    make_sandbox: Callable[..., Sandbox], tmp_path: Path
) -> None:
    sandbox = make_sandbox(nodes=4, gpus_per_node=1)  # a whole leaf is left
    path = write_job(tmp_path, "orphaned", 300)
    path.write_text(path.read_text().replace("pipeline = 2", "pipeline = 1"))
    path.write_text(path.read_text().replace("every = 0", "every = 20", 1))
    job = SlurmJob(sandbox, tmp_path, 2, str(path), *SMALL)
    job.wait_running()
    job.reach(job.commits(), 40)
    job.kill_node(job.protected())
    job.wait(lambda: job.restarts() == 1, "to be requeued", 120)
    assert job.wait_ended(END_SECONDS) == "COMPLETED", job.said()
    made_by = generations(job.run)
    assert len(made_by) == 300 and len(set(made_by.values())) == 2
    assert min(step for step, number in made_by.items() if number > 1) > 20


@pytest.mark.soak
def test_preempted_without_a_warning_it_goes_on_from_its_last_checkpoint(
    make_sandbox: Callable[..., Sandbox], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = "SlurmctldParameters=preempt_send_user_signal\n"
    assert setting in sandbox_files.SLURM_CONF
    silent = sandbox_files.SLURM_CONF.replace(setting, "")
    monkeypatch.setattr(sandbox_files, "SLURM_CONF", silent)
    sandbox = make_sandbox(nodes=2, gpus_per_node=1, grace_seconds=10)
    path = write_job(tmp_path, "unwarned", 300)
    text = path.read_text().replace("pipeline = 2", "pipeline = 1")
    path.write_text(text.replace("every = 0", "every = 20", 1))
    job = SlurmJob(sandbox, tmp_path, 2, str(path), *SMALL)
    job.wait_running()
    job.reach(job.commits(), 45)
    words = ("--partition=prod", "--nodes=2", "--exclusive", "--output=/dev/null")
    sandbox.run("sbatch", *words, "--wrap=sleep 5")
    job.wait(lambda: job.restarts() == 1, "to be requeued", 120)
    assert job.wait_ended(END_SECONDS) == "COMPLETED", job.said()
    made_by = generations(job.run)
    assert len(made_by) == 300 and len(set(made_by.values())) == 2
    assert min(step for step, number in made_by.items() if number > 1) > 20
