"""``phalanx train`` refuses what cannot work in one clear line, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner, Result

from phalanx.cli.app import app
from phalanx.config import ConfigError, load_job, resolve
from phalanx.train.report.run_folder import create
from tests.limits import file_size_limit
from tests.ranks import run_alone

JOB = """
runs = "{runs}"
[model]
preset = "tiny"
[train]
device = "cpu"
"""


@pytest.fixture(autouse=True)
def threads_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is forked here, so it does not matter what earlier tests left running."""
    monkeypatch.setattr("phalanx.train.rank.launch.require_single_thread", lambda: None)


def train(path: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["train", str(path), *arguments])


def refusal(result: Result) -> str:
    """What a person reads; anything but a plain refusal fails here."""
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    return result.stderr


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def job(tmp_path: Path, runs: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(JOB.format(runs=runs), encoding="utf-8")
    return path


def test_a_missing_job_file_is_named_with_the_nearest(job: Path) -> None:
    text = refusal(train(job.with_name("jop.toml")))
    assert "jop.toml: no such file" in text and 'did you mean "job.toml"' in text


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[train\n", "not valid TOML"),
        (b"\xff\xfe\x00", "cannot be read"),
        (None, "cannot be read"),
    ],
    ids=["broken", "binary", "folder"],
)
def test_an_unreadable_job_file_is_named(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "bad.toml"
    path.mkdir() if content is None else path.write_bytes(content)
    text = refusal(train(path))
    assert "bad.toml" in text and said in text


@pytest.mark.parametrize("size", ["0", "-3", "four"])
def test_a_world_size_that_is_no_count_is_refused(job: Path, runs: Path, size: str) -> None:
    assert "--world-size" in refusal(train(job, "--world-size", size))
    assert not runs.exists()


@pytest.mark.parametrize("setting", ["train.steps", "=3", ""])
def test_a_setting_without_key_or_value_is_refused(job: Path, runs: Path, setting: str) -> None:
    assert "must be key=value" in refusal(train(job, "--set", setting))
    assert not runs.exists()


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_runs_folder_that_is_a_file_is_refused(job: Path, runs: Path, below: str) -> None:
    runs.write_text("a file")
    text = refusal(train(job, "--world-size", "1", "--set", f"runs={runs / below}"))
    assert "runs = " in text and "cannot hold the run" in text and "you may write" in text


def test_a_runs_folder_one_may_not_write_is_refused(job: Path, runs: Path) -> None:
    runs.mkdir(mode=0o555)
    resolved = resolve(load_job(job), 1)

    def create_as_somebody() -> str:
        root = os.geteuid() == 0
        if root:
            os.seteuid(65534)  # permissions mean nothing to root
        try:
            create(resolved)
        except ConfigError as error:
            return str(error)
        finally:
            if root:
                os.seteuid(0)
        return "not refused"

    text = run_alone(create_as_somebody)
    assert "runs = " in text and "Permission denied" in text and "you may write" in text


def test_a_full_disk_is_refused_and_leaves_no_half_made_run(job: Path, runs: Path) -> None:
    with file_size_limit(0):
        result = train(job, "--world-size", "1")
    text = refusal(result)
    assert "runs = " in text and "free space" in text
    assert not list(runs.glob("*/*"))


@pytest.mark.parametrize("output", ["text", "json"])
def test_a_disk_too_small_for_one_checkpoint_is_refused(
    job: Path, runs: Path, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    flags = ["--json"] if output == "json" else []
    result = train(job, "--world-size", "1", *flags)
    text = refusal(result)
    if output == "json":
        (found,) = json.loads(result.stdout)["problems"]
        text = f"{found['key']} = {found['rule']}"
    assert "runs = " in text
    assert "takes 23.3 MiB" in text and "has 1.0 MiB left" in text
    assert not runs.exists()


def test_a_run_that_saves_nothing_needs_no_room_for_a_checkpoint(
    job: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    with file_size_limit(0):
        result = train(job, "--world-size", "1", "--set", "checkpoint.at_end=false")
    text = refusal(result)
    assert "checkpoint" not in text  # what refuses it is the disk without any room at all


def test_more_ranks_than_the_memory_holds_are_refused(
    job: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.train.rank.launch.available_memory", lambda: 1 << 30)
    text = refusal(train(job, "--world-size", "8"))
    assert "at most 4 ranks fit" in text
    assert not list(runs.glob("*/*"))


def test_a_cuda_job_without_a_device_is_refused_before_it_starts(
    job: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.train.rank.launch.count_cuda", lambda: 0)
    text = refusal(train(job, "--world-size", "2", "--set", "train.device=cuda"))
    assert "train.device" in text and 'set it to "cpu"' in text
    assert not list(runs.glob("*/*"))
