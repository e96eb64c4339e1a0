"""Orders about jobs of other engines: given there, or refused with what does it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from phalanx.cli.app import app
from phalanx.control.backends.slurm.programs import SlurmCommands, SlurmError


def said(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == code, done.output
    return " ".join(done.output.replace("│", " ").split())


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    asked: list[tuple[str, ...]] = []

    def run(self: SlurmCommands, *command: str, **_: object) -> str:
        asked.append(command)
        if command[-1] == "13":
            raise SlurmError("scontrol: Invalid job id specified")
        return ""

    monkeypatch.setattr(SlurmCommands, "run", run)
    return asked


@pytest.mark.parametrize("order", ["hold", "release", "requeue"])
def test_jobs_of_slurm_get_the_order_from_slurm(calls: list[tuple[str, ...]], order: str) -> None:
    assert f"slurm:12: scontrol {order} is done" in said(order, "slurm:12", "slurm:14")
    assert calls == [("scontrol", order, "12"), ("scontrol", order, "14")]
    assert json.loads(said(order, "slurm:12", "--json"))["done"] == ["slurm:12"]
    assert "Invalid job id" in said(order, "slurm:13", code=1)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("hold", "slurm:1", "2"), "apart"),
        (("hold", "kubernetes:run"), '"suspend":true'),
        (("release", "kubernetes:run"), '"suspend":false'),
        (("requeue", "kubernetes:run"), "takes no job back"),
        (("hold", "x"), "`phalanx ps --all`"),
        (("hold", "0"), "is no number of a job"),
    ],
)
def test_what_cannot_be_done_is_refused_with_what_helps(
    calls: list[tuple[str, ...]], words: tuple[str, ...], problem: str
) -> None:
    assert problem in said(*words, code=2) and not calls
