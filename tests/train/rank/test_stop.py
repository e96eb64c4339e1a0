"""A stop signal before the first step ends the run cleanly and soon; later ones disturb nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from phalanx.checkpoint import latest, read_manifest
from phalanx.config import to_toml
from phalanx.train.rank import rank
from phalanx.train.rank.stop import StopFlag, StoppedEarly
from phalanx.train.report.run_folder import RunFolder
from phalanx.train.trainer import Trainer
from tests.train.forked_runs import Run, alive, small_job, start

__all__ = ["start"]

Start = Callable[..., Run]
SOON = 100.0  # seconds; what is slowed down on purpose below takes far longer


def asleep_in(owner: Any, name: str, marker: Path, ranks: tuple[int, ...] = (0, 1)) -> Any:
    """What makes a part of the start take very long, on some of the ranks."""

    def slow() -> None:
        original = getattr(owner, name)

        def replaced(*args: Any, **kwargs: Any) -> Any:
            if int(os.environ["RANK"]) in ranks:
                (marker.parent / f"{marker.name}-{os.environ['RANK']}").touch()
                time.sleep(300)
            return original(*args, **kwargs)

        setattr(owner, name, replaced)

    return slow


def until_asleep(run: Run, marker: Path, count: int) -> None:
    run.until(lambda: len(list(marker.parent.glob(f"{marker.name}-*"))) == count)


def assert_left_early(run: Run, reason: str) -> None:
    assert run.wait(SOON) == 0, run.text
    assert (run.exit.code, run.exit.reason, run.exit.early) == (0, reason, True)
    assert "before the first step" in run.text
    assert latest(run.folder.checkpoints) is None
    assert not list(run.folder.path.glob("*.tmp"))


PARTS = {
    "joining": (rank, "choose_device"),
    "building": (Trainer, "__init__"),
    "restoring": (rank, "load_start"),
    "first step": (Trainer, "_update"),
}


# Every signal, and every part of the start; the others of all pairs take their time.
SHORT = {("joining", signal.SIGHUP), ("building", signal.SIGUSR1)}
SHORT |= {(part, signal.SIGTERM) for part in PARTS}
PAIRS = [
    pytest.param(part, number, marks=() if (part, number) in SHORT else pytest.mark.soak)
    for part in PARTS
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
]


@pytest.mark.parametrize(("part", "number"), PAIRS)
def test_a_signal_during_the_start_ends_the_run_at_once(
    tmp_path: Path, start: Start, part: str, number: signal.Signals
) -> None:
    marker = tmp_path / "asleep"
    run = start(small_job(tmp_path / "runs"), before=asleep_in(*PARTS[part], marker))
    until_asleep(run, marker, 2)
    ranks = run.rank_pids()
    run.kill(number)
    assert_left_early(run, number.name)
    assert not any(alive(pid) for pid in ranks)


@pytest.mark.parametrize("asked", [0, 1])
def test_a_signal_to_one_rank_during_the_start_ends_all_of_them(
    tmp_path: Path, start: Start, asked: int
) -> None:
    marker = tmp_path / "asleep"
    slow = asleep_in(rank, "load_start", marker, (asked,))
    run = start(small_job(tmp_path / "runs"), before=slow)
    until_asleep(run, marker, 1)
    os.kill(run.rank_pids()[asked], signal.SIGTERM)
    assert_left_early(run, "SIGTERM")


def test_a_second_signal_during_the_start_changes_nothing(tmp_path: Path, start: Start) -> None:
    marker = tmp_path / "asleep"
    run = start(small_job(tmp_path / "runs"), before=asleep_in(*PARTS["restoring"], marker))
    until_asleep(run, marker, 2)
    run.kill(signal.SIGTERM)
    run.kill(signal.SIGTERM)
    assert_left_early(run, "SIGTERM")


def test_a_second_signal_while_steps_are_made_still_saves(tmp_path: Path, start: Start) -> None:
    run = start(small_job(tmp_path, train__steps=100000))
    run.until_step(2)
    run.kill(signal.SIGTERM)
    run.kill(signal.SIGUSR1)
    run.kill(signal.SIGTERM)
    assert run.wait() == 0
    assert run.exit.reason in ("SIGTERM", "SIGUSR1") and not run.exit.early
    saved = latest(run.folder.checkpoints)
    assert saved is not None and read_manifest(saved).step == run.exit.step


def test_a_terminal_that_closes_saves_and_stops_the_run(tmp_path: Path, start: Start) -> None:
    run = start(small_job(tmp_path, train__steps=100000))
    run.until_step(2)
    run.kill(signal.SIGHUP)
    assert run.wait() == 0
    assert run.exit.reason == "SIGHUP"
    saved = latest(run.folder.checkpoints)
    assert saved is not None and read_manifest(saved).step == run.exit.step


def train_command(folder: Path, steps: int) -> list[str]:
    path = folder / "job.toml"
    path.write_text(to_toml(small_job(folder / "runs", train__steps=steps)))
    return [sys.executable, "-m", "phalanx", "train", str(path)]


def test_under_nohup_a_terminal_that_closes_stops_nothing(tmp_path: Path, start: Start) -> None:
    ignore = partial(signal.signal, signal.SIGHUP, signal.SIG_IGN)
    run = start(small_job(tmp_path, train__steps=12), before=ignore)
    run.until(lambda: bool(run.rank_pids()))
    run.kill(signal.SIGHUP)
    for pid in run.rank_pids():
        os.kill(pid, signal.SIGHUP)
    assert run.wait() == 0 and "all steps are done at step 12" in run.text.splitlines()[-1]


def test_a_command_whose_output_nobody_reads_goes_on_and_reports(tmp_path: Path) -> None:
    command = train_command(tmp_path, 12)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    with process:
        process.stdout.readline()
        process.stdout.close()  # as `| head -1` does
        told = process.stderr.read()
    assert process.returncode == 0 and "Traceback" not in told
    assert "stdout is gone (Broken pipe); the run goes on without it" in told
    (folder,) = (tmp_path / "runs").glob("*/*")
    end = RunFolder(folder).read_exit()
    assert end is not None and (end.reason, end.step) == ("done", 12)


def stop_reading() -> None:
    """What this process writes from now on nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)


def test_a_run_whose_records_nobody_reads_goes_on_and_reports(tmp_path: Path, start: Start) -> None:
    run = start(small_job(tmp_path, train__steps=12), json=True, before=stop_reading)
    assert run.wait() == 0 and "Traceback" not in run.text
    assert "stdout is gone (Broken pipe); the run goes on without it" in run.text
    assert (run.exit.reason, run.exit.step) == ("done", 12)


def test_a_signal_before_there_are_ranks_ends_the_command_with_zero(tmp_path: Path) -> None:
    command = train_command(tmp_path, 100000)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 90
        maps = Path(f"/proc/{process.pid}/maps")
        while "libtorch" not in maps.read_text() and time.monotonic() < deadline:
            time.sleep(0.005)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=90)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert "stopped on request before the" in output and "SIGTERM" in output


def test_a_signal_that_came_before_the_start_is_not_forgotten() -> None:
    stop = StopFlag()
    stop._on_signal(signal.SIGTERM, None)
    with pytest.raises(StoppedEarly):
        stop.starting()
    stop._on_signal(signal.SIGTERM, None)  # raises once
    assert stop.reason == "SIGTERM"
