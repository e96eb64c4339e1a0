"""The same worker under ``torchrun``, and commands that must not start one."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from phalanx.checkpoint import latest
from phalanx.config import to_toml
from phalanx.train.exits import ExitCode
from phalanx.train.rank import worker
from phalanx.train.report.records import StepRecord, read_records
from phalanx.train.report.run_folder import RunFolder
from tests.commands import run_module, run_phalanx
from tests.train.forked_runs import small_job

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def torchrun(ranks: int, *words: object) -> subprocess.CompletedProcess[str]:
    """Its ranks start as they do everywhere; only torchrun itself is forked."""
    asked = (f"--nproc-per-node={ranks}", "-m", "phalanx.train.rank.worker", *map(str, words))
    return run_module(
        *("torch.distributed.run", "--standalone", *asked),
        environment=ENVIRONMENT,
        folder=Path.cwd(),
        seconds=100,
    )


def train(path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    words = ("train", str(path), "--world-size", "2", *words)
    return run_phalanx(*words, environment=ENVIRONMENT)


def test_under_torchrun_all_ranks_share_one_run_folder(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(to_toml(small_job(tmp_path / "runs", 2)))
    done = torchrun(2, path, "--set", "train.steps=3")
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs" / "try").iterdir()
    folder = RunFolder(run)
    assert [r.step for r in read_records(folder.steps, StepRecord)] == [1, 2, 3]
    saved = latest(folder.checkpoints)
    assert saved is not None
    assert len(list(saved.glob("rank-*.safetensors"))) == 2
    assert folder.read_exit() is not None
    assert "step 3/3" in done.stdout
    assert "all steps are done at step 3" in done.stdout


@pytest.mark.parametrize(("rank", "local_rank"), [(0, 0), (1, 1), (2, 0)])
def test_a_wrong_key_is_named_by_one_rank_a_node_and_the_others_let_it_speak(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    rank: int,
    local_rank: int,
) -> None:
    path = tmp_path / "job.toml"
    path.write_text(to_toml(small_job(tmp_path / "runs", 2)))
    for name, value in {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))  # as torchrun does
    waits: list[float] = []
    monkeypatch.setattr(worker, "time", SimpleNamespace(sleep=waits.append))
    assert worker.main([str(path), "--set", "train.stepz=3"]) == ExitCode.CONFIG
    said = capsys.readouterr().err
    assert ("train.stepz" in said and "did you mean" in said) == (local_rank == 0)
    assert bool(waits) == (local_rank != 0)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[train]\nstepz = 3\n", "stepz"),
        ("[train]\nsteps = 'three'\n", "train.steps"),
        ("[train\n", "job.toml"),
    ],
)
def test_a_bad_file_never_starts_a_process(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text(f'runs = "{tmp_path / "runs"}"\n{text}')
    done = train(path)
    assert done.returncode == ExitCode.CONFIG
    assert named in done.stderr
    assert not (tmp_path / "runs").exists()


def test_the_command_trains_and_reports_in_json(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(to_toml(small_job(tmp_path / "runs", 2)))
    done = train(path, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["reason"] == "done"
