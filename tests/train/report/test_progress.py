"""What a person reads while a run goes on and when it ends."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import msgspec
import pytest

from phalanx.train.exits import CHECKPOINT_INTERVAL, NOT_ARCHIVED, ExitCode, ExitInfo
from phalanx.train.rank.loop import judged_by_archive
from phalanx.train.report.progress import Live, Plain, WaitClock, event_text, exit_text, from_here
from phalanx.train.report.records import CheckpointRecord, StartRecord
from phalanx.train.report.run_folder import RunFolder
from tests.train.forked_runs import small_job
from tests.train.sample_records import checkpoint_record, step_record


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def test_the_live_display_fits_a_terminal_of_80_columns(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    display = Live(small_job(folder.path), folder, WaitClock())
    display.write(checkpoint_record(2))
    display.write(step_record(3, tokens_per_second=1234567.0, eta_seconds=86399.0))
    display.close()
    for thread in threading.enumerate():
        if thread is not threading.main_thread():
            thread.join(30)  # the screen's: later tests fork, and must be alone then
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out)
    *_, bar, figures = shown.replace("\r", "\n").strip().splitlines()
    assert re.fullmatch(r"step 3/6 .{40} eta 23:59:59", bar.strip())
    assert figures.strip() == "loss 4.2500  grad 1.500  1,234,567 tok/s  mfu n/a on cpu"
    assert "checkpoint of step 2" in shown


def test_plain_lines_come_at_the_first_step_at_the_interval_and_at_the_end(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    display = Plain(small_job(folder.path, log__every=2), folder, WaitClock())
    for step in range(1, 6):
        display.write(step_record(step))
    display.close()
    steps = re.findall(r"^step (\d)/6", capsys.readouterr().out, re.MULTILINE)
    assert steps == ["1", "2", "4", "5"]


def test_the_wait_for_the_first_step_counts_what_was_waited_before() -> None:
    assert float(WaitClock().text().split()[3]) < 50
    assert 100 <= float(WaitClock(waited_seconds=100).text().split()[3]) < 150


def test_a_run_that_lost_records_on_the_way_ends_with_a_warning(folder: RunFolder) -> None:
    done = ExitInfo(
        code=ExitCode.DONE, reason="done", message="all done", details={"Wandb failed": "no key"}
    )
    assert exit_text(done, folder).startswith("warning: Wandb failed: no key\nall done;")


def test_the_planned_interval_is_no_warning(folder: RunFolder) -> None:
    planned = {CHECKPOINT_INTERVAL: "every 9 min"}
    done = ExitInfo(code=ExitCode.DONE, reason="done", message="all done", details=planned)
    assert exit_text(done, folder).startswith("checkpoints every 9 min\nall done;")


def test_a_stop_on_request_names_the_signal(folder: RunFolder) -> None:
    stopped = ExitInfo(code=ExitCode.DONE, reason="SIGTERM", message="stopped at step 3")
    assert "stopped at step 3 (SIGTERM);" in exit_text(stopped, folder)


def test_paths_are_shown_as_one_types_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert from_here(tmp_path / "runs" / "x") == Path("runs/x")
    assert from_here(Path("/elsewhere")) == Path("/elsewhere")


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.0004, "0.4 ms"), (0.05, "50.0 ms"), (2.0, "2.0 s")]
)
def test_how_long_a_save_held_up_is_never_nothing(seconds: float, words: str) -> None:
    record = CheckpointRecord(job="try", generation=0, step=2, path="p", seconds=seconds)
    assert event_text(record) == f"checkpoint of step 2 (held up {words}): p"


@pytest.mark.parametrize(
    ("step", "tier", "path", "words"),
    [
        (0, "", "", "nothing to resume from; starts fresh"),
        (0, "weights", "hf/llama", "starts at step 0 with the weights of hf/llama"),
        (7, "the nodes' memory", "", "continues after step 7 from the nodes' memory"),
        (7, "the archive", "s3://b/7", "continues after step 7 from the archive: s3://b/7"),
    ],
)
def test_a_run_says_what_it_begins_with(step: int, tier: str, path: str, words: str) -> None:
    record = StartRecord(job="try", generation=0, step=step, tier=tier, path=path)
    assert event_text(record) == words
    passed = msgspec.structs.replace(record, passed_over=("x is damaged",))
    assert event_text(passed) == f"passed over: x is damaged\n{words}"
    changed = msgspec.structs.replace(record, changes=("the rate jumps",))
    assert event_text(changed) == f"{words}\nthe rate jumps"


def test_a_run_that_lacks_a_copy_is_done_and_says_what_is_not_archived(folder: RunFolder) -> None:
    done = ExitInfo(
        code=ExitCode.DONE,
        reason="done",
        message="all 9 steps are done",
        details={NOT_ARCHIVED: "steps 9: 403"},
    )
    told = exit_text(judged_by_archive(done), folder)
    assert told.startswith("all 9 steps are done; not in the archive: steps 9: 403 (exit 17);")
    assert "failed" not in told and "what to do: The checkpoints are on disk" in told
