"""``phalanx sweep``: what is said without a server, and what trials and fits look like."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from phalanx.cli.train import sweep as command
from phalanx.cluster.jobs.job import JobState
from phalanx.control.wire.api_types import JobList, SweepLine, SweepList, SweepOut, TrialOut

ROOT = Path(__file__).parents[3]
SIZES = """
name = "sizes"
job = "{job}"
ranks = 1
[parameters.size]
values = [
  {{ "model.dim" = 32, "model.ffn" = 64 }},
  {{ "model.dim" = 64, "model.ffn" = 128 }},
  {{ "model.dim" = 128, "model.ffn" = 256 }},
]
[parameters."train.steps"]
values = [100, 400, 1600]
"""


class PlayedClient:
    """Nine trials whose losses follow a law."""

    drivers: ClassVar[list[Any]] = []

    def __init__(self, server: str = "", state: Path | None = None) -> None:
        self.path = ""

    def node_gpus(self) -> int:
        return 1

    def get(self, path: str, kind: Any, after: int = 0, **query: Any) -> Any:
        name = path.rpartition("/")[2]
        if path == "/v1/jobs":
            return JobList(jobs=self.drivers, next_after=0)
        if path == "/v1/sweeps":
            line = SweepLine(
                sweep="sizes.0",
                user="ann",
                team="red",
                metric="loss",
                better="lower",
                trials=9,
                live=0,
                failed=0,
                best=2.5,
                began_ns=1,
            )
            return SweepList(sweeps=[line])
        trials = []
        for number in range(9):
            size, steps = number // 3, number % 3
            value = 2.0 + 3.0 * 2.0 ** (-1.0 * size) + 2.0 * 4.0 ** (-0.5 * steps)
            trials.append(
                TrialOut(
                    job=number + 1,
                    trial=number,
                    rung=0,
                    steps=100 * 4**steps,
                    settings={"model.dim": str(32 * 2**size), "train.steps": str(100 * 4**steps)},
                    state=JobState.DONE,
                    why="",
                    step=1,
                    value=value,
                    value_unknown=False,
                    ran_seconds=5.0,
                    gpus=0,
                    ranks=1,
                    dollars_per_gpu_hour=2.0,
                )
            )
        return SweepOut(sweep=name, metric="loss", better="lower", trials=trials, next_after=0)


@pytest.fixture
def sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(command, "Client", PlayedClient)
    path = tmp_path / "sizes.toml"
    path.write_text(SIZES.format(job=ROOT / "examples" / "sweep-job.toml"))
    return path


def said(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(command.app, words)
    assert done.exit_code == code, done.output
    return done.output


def test_the_example_is_planned_without_a_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PHALANX_STATE", str(tmp_path / "none"))
    monkeypatch.delenv("PHALANX_SERVER", raising=False)
    text = said("plan", str(ROOT / "examples" / "sweep.toml"))
    assert "27 trials" in text and "27 x 20 + 9 x 40 + 3 x 120 = 1,260 steps" in text
    told = json.loads(said("plan", str(ROOT / "examples" / "sweep.toml"), "--json"))
    assert len(told["trials"]) == 27 and told["steps"] == 1260 and told["cost"] is None
    assert "no server is known here" in said("run", str(ROOT / "examples/sweep.toml"), code=3)


def test_trials_are_shown_best_first_as_a_table_json_and_csv(sizes: Path) -> None:
    lines = said("show", str(sizes), "--top", "2").splitlines()
    assert lines[1].split()[:2] == ["8", "9"] and lines[-1].startswith("2 of 9 trials")
    told = json.loads(said("show", str(sizes), "--json"))
    assert [each["trial"] for each in told["trials"]][:2] == [8, 7]
    rows = said("show", str(sizes), "--csv").splitlines()
    assert rows[0] == "trial,job,state,steps,loss,seconds,gpus,model.dim,train.steps"
    assert len(rows) == 10 and rows[1].startswith("8,9,done,1600,")


def test_who_drives_a_sweep_is_said(sizes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "drive" not in said("show", str(sizes))  # it is at its end
    key = json.loads(said("show", str(sizes), "--json"))["sweep"]
    driver = SimpleNamespace(id=7, name=f"{key}.driver", state="running")
    monkeypatch.setattr(PlayedClient, "drivers", [driver])
    assert "job 7 drives it (running)" in said("show", str(sizes))
    assert "job 7 drives it already" in said("run", str(sizes), "--detach")


def test_a_sweep_of_sizes_is_fitted_and_reported(
    sizes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    out = tmp_path / "report.md"
    text = said("fit", str(sizes), "--flops", "1e15", "--out", str(out))
    assert "# Scaling law of sizes." in text and "| 1e+15 |" in text and "N^" in text
    assert out.read_text() == text
    assert "is no compute" in said("fit", str(sizes), "--flops", "0", code=2)
    away = tmp_path / "away" / "report.md"
    assert "No such file or directory" in said("fit", str(sizes), "--out", str(away), code=2)


def test_what_runs_nowhere_is_not_cancelled(sizes: Path) -> None:
    assert "no trial waits or runs" in said("cancel", str(sizes), code=1)
