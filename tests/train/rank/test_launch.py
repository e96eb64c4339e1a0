"""Runs from the outside: what a person or a scheduler does to them, and what they leave behind."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from phalanx.checkpoint import latest, read_manifest
from phalanx.config import Job
from phalanx.data import ShardWriter
from phalanx.train.exits import ExitCode, ExitInfo, NonFiniteLoss
from phalanx.train.measure.meter import Meter
from phalanx.train.rank.launch import launch
from phalanx.train.rank.threads import ThreadsError
from phalanx.train.report import run_folder
from phalanx.train.report.records import ValidationRecord, read_records
from phalanx.train.report.run_folder import RunFolder
from phalanx.train.trainer import Trainer
from tests.train.forked_runs import Run, alive, small_job, start

__all__ = ["start"]

Start = Callable[..., Run]


def test_a_run_leaves_its_records_checkpoint_configuration_and_provenance(
    tmp_path: Path, start: Start
) -> None:
    run = start(small_job(tmp_path, parallel__zero=3))
    assert run.wait() == 0
    assert [record.step for record in run.steps] == [1, 2, 3, 4, 5, 6]
    assert [record.tokens_seen for record in run.steps] == [64 * step for step in range(1, 7)]
    assert all(record.parts.forward > 0 and record.parts.backward > 0 for record in run.steps)
    assert run.steps[-1].parts.snapshot > 0  # the checkpoint at the end
    assert run.exit.reason == "done"
    assert run.exit.checkpoint == str(latest(run.folder.checkpoints))
    job = msgspec.json.decode((run.folder.config / "job.json").read_bytes(), type=Job)
    assert job.train.steps == 6
    found = json.loads((run.folder.provenance / "provenance.json").read_text())
    assert found["torch"]["devices"] == ["cpu", "cpu"]
    assert {"torch", "numpy", "msgspec"} <= found["packages"].keys()
    assert found["seeds"] == {"train": 0, "data": 0}
    assert (run.folder.logs / "rank-1.log").exists()
    assert "step 6/6" in run.text and "n/a on cpu" in run.text and "first step after" in run.text


def test_json_output_is_one_record_a_line_and_the_exit(tmp_path: Path, start: Start) -> None:
    run = start(small_job(tmp_path), json=True)
    assert run.wait() == 0
    lines = [json.loads(line) for line in run.text.splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "step"] == [1, 2, 3, 4, 5, 6]
    assert (lines[-1]["kind"], lines[-1]["code"]) == ("exit", 0)
    assert lines[-1]["run_folder"] == str(run.folder.path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_stop_signal_finishes_the_step_saves_and_exits_with_zero(
    tmp_path: Path, start: Start, number: signal.Signals
) -> None:
    run = start(small_job(tmp_path, train__steps=100000, checkpoint__at_end="false"))
    run.until_step(2)
    run.kill(number)
    assert run.wait() == 0
    assert (run.exit.code, run.exit.reason) == (0, number.name)
    saved = latest(run.folder.checkpoints)
    assert saved is not None
    assert read_manifest(saved).step == run.exit.step == run.steps[-1].step


def test_a_signal_to_one_rank_stops_all_of_them_at_the_same_step(
    tmp_path: Path, start: Start
) -> None:
    run = start(small_job(tmp_path, train__steps=100000))
    run.until_step(2)
    os.kill(run.rank_pids()[1], signal.SIGUSR1)
    assert run.wait() == 0
    saved = latest(run.folder.checkpoints)
    assert saved is not None
    assert read_manifest(saved).step == run.exit.step


def test_a_killed_rank_is_named_and_the_others_wait_for_no_collective(
    tmp_path: Path, start: Start
) -> None:
    endless = {"train__steps": 100000, "train__collective_timeout_seconds": 3600.0}
    run = start(small_job(tmp_path, 4, checkpoint__every=2, **endless), 4)
    run.until_step(4)
    run.until(lambda: latest(run.folder.checkpoints) is not None)
    ranks = run.rank_pids()
    os.kill(ranks[2], signal.SIGKILL)
    assert run.wait() == ExitCode.LOST_PEER
    assert not any(alive(pid) for pid in ranks)
    assert (run.exit.rank, run.exit.reason) == (2, "rank_killed")
    assert "SIGKILL" in run.exit.message
    assert run.exit.checkpoint  # what to continue from
    assert "rank 2" in run.text and "rank-2.log" in run.text


def test_ranks_do_not_outlive_a_killed_launcher(tmp_path: Path, start: Start) -> None:
    run = start(small_job(tmp_path, train__steps=100000))
    run.until_step(1)
    ranks = run.rank_pids()
    run.kill(signal.SIGKILL)
    run.wait()
    run.until(lambda: not any(alive(pid) for pid in ranks))


def is_stopped(pid: int) -> bool:
    """Whether every thread of a process stands still."""
    threads = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(text.rpartition(")")[2].split()[0] == "T" for text in threads)


def is_pending(pid: int, number: signal.Signals) -> bool:
    """Whether a stopped process will find a signal when it goes on."""
    status = Path(f"/proc/{pid}/status").read_text()
    waiting = int(re.findall(r"^ShdPnd:\s*(\w+)", status, re.MULTILINE)[0], 16)
    return bool(waiting >> (number - 1) & 1)


def test_a_second_interrupt_ends_at_once(tmp_path: Path, start: Start) -> None:
    run = start(small_job(tmp_path, train__steps=100000))
    run.until_step(1)
    ranks = run.rank_pids()
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)  # ranks that will not come back by themselves
    run.until(lambda: all(is_stopped(pid) for pid in ranks))
    run.kill(signal.SIGINT)
    # Two at once are one to a process: the second comes when the first was passed on.
    run.until(lambda: all(is_pending(pid, signal.SIGINT) for pid in ranks))
    run.kill(signal.SIGINT)
    assert run.wait() == ExitCode.INTERRUPTED
    assert run.exit.code == ExitCode.INTERRUPTED
    assert not any(alive(pid) for pid in ranks)


def test_a_full_disk_under_the_checkpoint_has_its_own_exit(tmp_path: Path, start: Start) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (32768, 32768))

    job = small_job(tmp_path, log__tensorboard="false", checkpoint__every=4)
    run = start(job, before=limit)
    assert run.wait() == ExitCode.CHECKPOINT  # of the last save: the one of step 4 stops nothing
    assert run.exit.reason == "disk_full"
    assert str(run.folder.checkpoints) in str(run.exit.details["path"])
    assert "is full" in run.exit.advice
    assert latest(run.folder.checkpoints) is None  # nothing that looks complete
    assert run.steps[-1].step == job.train.steps - 1  # what was learned before is not lost
    (told,) = [record for record in run.checkpoints if record.step == 4]
    assert "File too large" in told.problem


def test_a_loss_that_stays_non_finite_ends_the_run(tmp_path: Path, start: Start) -> None:
    job = small_job(
        tmp_path, train__max_non_finite=3, train__steps=1000, optimizer__learning_rate="1e30"
    )
    run = start(job)
    assert run.wait() == ExitCode.NON_FINITE
    bad = [record.step for record in run.steps if record.non_finite]
    assert len(bad) >= 3
    assert f"from step {bad[0]} on" in run.exit.message
    assert "optimizer.learning_rate" in run.exit.advice


def test_exhausted_data_saves_and_has_its_own_exit(tmp_path: Path, start: Start) -> None:
    with ShardWriter(tmp_path / "corpus", 64, end_of_document=0) as writer:
        writer.write([1 + i % 63 for i in range(16 * 14)])
        writer.end_document()
        writer.finish()
    job = small_job(tmp_path, data__source="shards", data__path=tmp_path / "corpus", data__epochs=1)
    run = start(job)
    assert run.wait() == ExitCode.DATA_EXHAUSTED
    assert "data.epochs" in run.exit.advice
    assert [record.step for record in run.steps] == [1, 2, 3]
    saved = latest(run.folder.checkpoints)
    assert saved is not None and read_manifest(saved).step == 3


def test_auto_resume_continues_the_newest_checkpoint_of_the_name(
    tmp_path: Path, start: Start
) -> None:
    whole = start(small_job(tmp_path / "whole", train__deterministic="true"))
    half = {"train__deterministic": "true", "checkpoint__resume": "auto"}
    stopped = start(small_job(tmp_path, checkpoint__every=3, checkpoint__keep=0, **half))
    assert whole.wait() == stopped.wait() == 0
    newest = stopped.folder.checkpoints / "step-00000006"
    newest.rename(newest.with_name("gone"))
    again = start(small_job(tmp_path, **half))
    assert again.wait() == 0
    assert [record.step for record in again.steps] == [4, 5, 6]
    assert [r.loss for r in again.steps] == [r.loss for r in whole.steps[3:]]
    found = json.loads((again.folder.provenance / "provenance.json").read_text())
    assert found["parent_checkpoint"] == str(stopped.folder.checkpoints / "step-00000003")


def test_a_missing_checkpoint_is_refused_before_any_rank_starts(
    tmp_path: Path, start: Start
) -> None:
    run = start(small_job(tmp_path, checkpoint__resume=tmp_path / "nowhere"))
    assert run.wait() == ExitCode.CONFIG
    assert "checkpoint.resume" in run.text
    assert not list(run.folder.logs.iterdir())


def test_a_missing_corpus_is_refused_before_any_rank_starts(tmp_path: Path, start: Start) -> None:
    job = small_job(tmp_path, data__source="shards", data__path=tmp_path / "nowhere")
    run = start(job, json=True)
    assert run.wait() == ExitCode.CONFIG
    assert json.loads(run.text)["problems"][0]["key"] == "data.path"
    assert not list(run.folder.logs.iterdir())


def test_validation_is_recorded_and_shown(tmp_path: Path, start: Start) -> None:
    job = small_job(
        tmp_path, data__validation_fraction=0.1, train__validate_every=3, train__validate_samples=4
    )
    run = start(job)
    assert run.wait() == 0
    records = list(read_records(run.folder.validation, ValidationRecord))
    assert [record.step for record in records] == [3, 6]
    assert all(record.loss is not None and 3 < record.loss < 6 for record in records)
    assert "validation loss after step 3" in run.text


def test_chosen_steps_are_traced_on_every_rank(tmp_path: Path, start: Start) -> None:
    run = start(small_job(tmp_path, log__profile_steps="[2, 4]"))
    assert run.wait() == 0
    for rank in range(2):
        trace = json.loads((run.folder.logs / f"trace-rank-{rank}.json").read_text())
        assert any("aten::" in event.get("name", "") for event in trace["traceEvents"])


def test_the_launcher_is_single_threaded_whatever_the_environment_says(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from phalanx.train.rank.launch import launch\n"
        "from tests.train.forked_runs import small_job\n"
        "from pathlib import Path\n"
        "sys.exit(launch(small_job(Path(sys.argv[1]), 1, train__steps=1), 1))\n"
    )
    environment = {key: text for key, text in os.environ.items() if "NUM_THREADS" not in key}
    environment["OPENBLAS_NUM_THREADS"] = "4"  # a pool that lives from the import of numpy on
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "step 1/1" in done.stdout


def test_a_caller_with_threads_is_told_before_anything_is_made(tmp_path: Path) -> None:
    leave = threading.Event()
    other = threading.Thread(target=leave.wait, args=(60,))
    other.start()
    try:
        with pytest.raises(ThreadsError, match=r"has \d+ threads.*phalanx train JOB\.toml"):
            launch(small_job(tmp_path / "runs"), 2)
    finally:
        leave.set()
        other.join()
    assert not (tmp_path / "runs").exists()


def break_rank_one() -> None:
    original = Trainer.train_step

    def broken(self, *args):  # type: ignore[no-untyped-def]
        if self.mesh.rank == 1 and self.step == 2:
            raise RuntimeError("a wire came loose")
        return original(self, *args)

    Trainer.train_step = broken  # type: ignore[method-assign]


def test_an_error_in_one_rank_is_reported_with_that_rank(tmp_path: Path, start: Start) -> None:
    run = start(small_job(tmp_path), before=break_rank_one)
    assert run.wait() == ExitCode.OTHER
    assert (run.exit.rank, run.exit.step) == (1, 2)
    assert run.exit.message == "a wire came loose"
    assert "Traceback" in run.folder.log(1).read_text()


def test_logs_on_a_full_disk_do_not_hide_why_a_rank_failed(tmp_path: Path, start: Start) -> None:
    def before() -> None:
        break_rank_one()
        RunFolder.log = lambda self, rank: Path("/dev/full")  # type: ignore[method-assign]

    run = start(small_job(tmp_path), before=before)
    assert run.wait() == ExitCode.OTHER
    assert (run.exit.rank, run.exit.message) == (1, "a wire came loose")


def test_a_run_whose_report_cannot_be_written_says_so(tmp_path: Path, start: Start) -> None:
    def before() -> None:
        def refuse(self: RunFolder, info: ExitInfo) -> ExitInfo:
            raise OSError(errno.ENOSPC, "No space left on device")

        RunFolder.write_exit = refuse  # type: ignore[method-assign]

    run = start(small_job(tmp_path, train__steps=1), before=before)
    assert run.wait() == 0
    assert "none could write its report: is the disk full?" in run.text


def test_a_failure_whose_report_cannot_be_written_is_told_by_its_exit_code(
    tmp_path: Path, start: Start
) -> None:
    def before() -> None:
        def full(path: Path, text: bytes) -> None:
            path.touch()  # the name still fits, its content does not
            raise OSError(errno.ENOSPC, "No space left on device")

        run_folder.write_synced = full

        def nan(*args: object) -> None:
            raise NonFiniteLoss(1, 2)

        Meter.check_finite = nan  # type: ignore[method-assign]

    run = start(small_job(tmp_path), before=before)
    assert run.wait() == ExitCode.NON_FINITE
    assert "exit code 13 (non finite)" in run.text and "is the disk full?" in run.text
    assert not list(run.folder.path.glob("*.tmp"))
