"""``phalanx simulate trace`` and ``policies``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from phalanx.cli.plan.simulate import app

ROWS = "submit_time,duration,gpu_num,vc\n0,600,8,a\n10,300,8,b\n20,60,8,b\n30,x,8,b\n40,9,0,b\n"


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.csv"
    path.write_text(ROWS)
    return str(path)


def test_policies_are_put_side_by_side_and_drawn(trace: str, tmp_path: Path) -> None:
    plot = tmp_path / "policies.svg"
    asked = ["policies", trace, "--gpus", "8", "--policy", "default", "--policy", "fifo"]
    done = CliRunner().invoke(app, [*asked, "--plot", str(plot), "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.output)
    first, second = report["policies"]
    # The shortest goes before the longer one that came first.
    assert first["outcome"]["wait_hours"]["mean"] < second["outcome"]["wait_hours"]["mean"]
    assert report["left_out"] == {"cannot be read": 1, "ask for no GPU": 1}
    assert report["unreadable"] == [f"{trace}:5: could not convert string to float: 'x'"]
    assert "<svg" in plot.read_text()
    table = CliRunner().invoke(app, asked).output
    for told in ("wait, hours", "ends, hours", "slowdown", "p99", "wait by GPUs", "wait by team"):
        assert told in table


def test_a_trace_is_told_by_size_and_team_and_what_was_left_out(trace: str) -> None:
    done = CliRunner().invoke(app, ["trace", trace, "--gpus", "8"])
    assert done.exit_code == 0, done.output
    for told in ("3 jobs on 8 GPUs", "5-8", "1 that cannot be read", "1 that ask for no GPU"):
        assert told in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (["--policy", "fifi"], "did you mean"),
        (["--set", "queue.nothing=1"], "queue.nothing"),
        (["--set", "fleet.gpus=8"], "has an option of its own"),
        (["--gpus", "12"], "must fill nodes"),
        (["--plot", "x.bmp"], "must end in"),
        (["--faults", "none-such"], "none-such"),
        (["--gpus", "1", "--node-gpus", "1", "--jobs", "1"], "give the fleet more GPUs"),
        (["--skip", "9"], "leaves none of the"),
    ],
)
def test_what_cannot_be_is_refused(trace: str, asked: list[str], told: str) -> None:
    done = CliRunner().invoke(app, ["policies", trace, *asked])
    assert done.exit_code == 2
    assert told in done.output
