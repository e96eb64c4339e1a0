"""A claim's command is run, its figures are read, and whatever goes wrong is a failure."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from proof import runner
from proof.claim import Claim, Figure, Need
from proof.history import Measurement
from proof.machine import machine_name

REPORT = """
import json, os, pathlib, sys
count = pathlib.Path(sys.argv[1])
number = int(count.read_text()) + 1 if count.exists() else 1
count.write_text(str(number))
figures = eval(sys.argv[2])
print("measured number", number)
if figures is not None:
    pathlib.Path(os.environ["PHALANX_FIGURES"]).write_text(json.dumps(figures))
else:
    sys.exit("it broke")
"""


@pytest.fixture
def counter(tmp_path: Path) -> Path:
    (tmp_path / "bench.py").write_text(REPORT)
    return tmp_path / "count"


def claim(counter: Path, figures: str) -> Claim:
    script = counter.parent / "bench.py"
    rate = Figure("rate", "how fast", "/s", at_least=100.0)
    words = f"python {script} {counter} '{figures}'"
    return Claim(name="c", says="", command=words, figures=(rate,), minutes=0.1)


def test_reported_figures_are_measured(counter: Path) -> None:
    outcome = runner.Prover([]).prove(claim(counter, '{"rate": 200.0, "other": 1}'))
    assert not outcome.failed
    assert outcome.measurement is not None
    assert outcome.measurement.figures == {"rate": 200.0}
    assert outcome.measurement.machine == machine_name()
    assert "bench.py" in outcome.measurement.command
    assert counter.read_text() == "1"


def test_a_missed_bar_is_measured_again_and_then_fails(counter: Path) -> None:
    outcome = runner.Prover([]).prove(claim(counter, '{"rate": 50.0}'))
    assert outcome.failed
    assert counter.read_text() == str(1 + runner.AGAIN)
    assert f"measured number {1 + runner.AGAIN}" in outcome.output  # what it said is shown then


def test_a_gpu_is_not_asked_again(counter: Path) -> None:
    dear = dataclasses.replace(claim(counter, '{"rate": 50.0}'), needs=(Need.CUDA,))
    assert runner.Prover([]).prove(dear).failed
    assert counter.read_text() == "1"


def test_noise_that_passes_is_no_failure(counter: Path) -> None:
    outcome = runner.Prover([]).prove(claim(counter, '{"rate": 90.0 + 10 * number}'))
    assert not outcome.failed
    assert outcome.measurement is not None and outcome.measurement.figures == {"rate": 100.0}


def past(pace: float = 0.0) -> Measurement:
    return Measurement(
        claim="c",
        date="2026-11-16",
        commit="abc",
        machine=machine_name(),
        busy=0.0,
        trusted=True,
        seconds=1.0,
        figures={"rate": 300.0},
        pace=pace,
    )


def test_a_fall_below_history_fails_though_the_bar_is_met(counter: Path) -> None:
    outcome = runner.Prover([past()]).prove(claim(counter, '{"rate": 200.0}'))
    assert [verdict.problem for verdict in outcome.verdicts] == ["it was 300/s before"]


@pytest.mark.parametrize(("pace", "fails"), [(1.0, True), (1.5, False), (0.5, True)])
def test_a_machine_that_is_slower_today_is_no_regression(
    counter: Path, monkeypatch: pytest.MonkeyPatch, pace: float, fails: bool
) -> None:
    monkeypatch.setattr(runner, "pace_seconds", lambda: pace)
    monkeypatch.setattr(runner, "wait_until_quiet", lambda seconds: 0.0)
    monkeypatch.setattr(runner, "busy_share", lambda: 0.0)
    monkeypatch.setattr(runner, "SETTLE_SECONDS", 0.0)
    asked = dataclasses.replace(claim(counter, '{"rate": 200.0}'), needs=(Need.QUIET,))
    outcome = runner.Prover([past(pace=1.0)]).prove(asked)
    assert outcome.failed == fails
    assert outcome.measurement is not None and outcome.measurement.pace == pace


def test_a_command_without_figures_fails_with_its_last_words(counter: Path) -> None:
    outcome = runner.Prover([]).prove(claim(counter, "None"))
    assert outcome.failed and "it broke" in outcome.error
    assert outcome.measurement is None


def test_the_environment_is_this_one() -> None:
    assert runner.arguments("python -m x --y")[0] == sys.executable
    assert runner.arguments("phalanx ps")[0] == str(Path(sys.executable).parent / "phalanx")


def test_a_figure_that_is_not_reported_is_not_measured_again(counter: Path) -> None:
    outcome = runner.Prover([]).prove(claim(counter, '{"other": 1.0}'))
    assert outcome.failed
    assert counter.read_text() == "1"
