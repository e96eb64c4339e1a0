"""``phalanx pipeline`` and ``phalanx models``: what is printed, and with which exit code."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from phalanx.cli.app import app

PIPELINE = """
name = "small"
[steps.make]
command = ["cp", "{inputs.text}", "{outputs.out}"]
inputs = { text = "text.txt" }
outputs = { out = "out" }
[steps.measure]
command = ["sh", "-c", 'echo "{{\\"scores\\": {{\\"loss\\": 2.5}}}}" > {outputs.scores}']
inputs = { out = "make.out" }
outputs = { scores = "scores.json" }
scores = ["loss"]
[steps.ok]
kind = "approval"
question = "release it?"
after = ["measure"]
[steps.register]
kind = "register"
model = "toy"
inputs = { checkpoint = "make.out", scores = "measure.scores" }
after = ["ok"]
"""


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.toml").write_text(PIPELINE)
    Path("text.txt").write_text("text")


def test_from_plan_to_release() -> None:
    planned = call("pipeline", "plan", "p.toml")
    assert planned.exit_code == 0 and "not done with these inputs" in planned.stdout
    ran = call("pipeline", "run", "p.toml")
    assert ran.exit_code == os.EX_TEMPFAIL
    assert "decide: phalanx answer ok --pipeline p.toml --approve" in ran.stdout
    assert "release it?" in call("answer", "--pipeline", "p.toml").stdout
    answered = call("answer", "ok", "--pipeline", "p.toml", "--approve")
    assert "ok is approved" in answered.stdout
    resumed = call("pipeline", "resume", "p.toml")
    assert resumed.exit_code == 0 and "run 1 is done: 4 done" in resumed.stdout
    again = json.loads(call("pipeline", "run", "p.toml", "--json").stdout)
    assert {each["state"] for each in again["tasks"].values()} == {"cached"}
    shown = call("pipeline", "show", "p.toml", "--run", "1")
    assert "loss 2.5" in shown.stdout and "approved by" in shown.stdout
    assert "toy" in call("models", "ls").stdout
    refused = call("models", "promote", "toy", "--gate", "loss < 2")
    assert refused.exit_code == 1 and "stays candidate" in refused.output
    assert "toy 1 is released" in call("models", "promote", "toy", "--gate", "loss < 3").stdout
    entry = json.loads(call("models", "show", "toy", "--json").stdout)
    assert entry["stage"] == "released" and entry["lineage"]["pipeline"] == "small"
    assert "manifest:" in call("models", "show", "toy").stdout


def test_graphs_are_drawn_for_people_and_for_tools() -> None:
    assert "register" in call("pipeline", "graph", "p.toml").stdout
    assert '"make" -> "measure";' in call("pipeline", "graph", "p.toml", "--dot").stdout
    assert "graph LR" in call("pipeline", "graph", "p.toml", "--mermaid").stdout
    call("pipeline", "run", "p.toml")
    assert "graph.svg: run 1" in call("pipeline", "graph", "p.toml", "--svg", "graph.svg").stdout
    assert "asking" in Path("graph.svg").read_text()
    refused = call("pipeline", "graph", "p.toml", "--svg", "away/graph.svg")
    assert refused.exit_code == 2 and "away/graph.svg: No such file" in refused.stderr
    waits = json.loads(call("pipeline", "graph", "p.toml", "--json").stdout)
    assert waits["ok"] == [{"task": "measure", "end": "ok"}]


def test_mistakes_end_with_exit_code_2_and_nothing_is_made() -> None:
    Path("p.toml").write_text(PIPELINE.replace("text.txt", "none.txt"))
    refused = call("pipeline", "run", "p.toml")
    assert refused.exit_code == 2 and "steps.make.inputs.text = none.txt" in refused.output
    assert not Path("runs").exists()


def test_what_has_no_run_says_so() -> None:
    for command in ("show", "resume", "cancel"):
        said = call("pipeline", command, "p.toml")
        assert said.exit_code == 1 and "has no runs yet" in said.output
    assert "needs --pipeline" in call("answer", "ok").output


def test_a_failed_run_ends_with_exit_code_1_and_names_the_log() -> None:
    Path("p.toml").write_text(
        'name = "bad"\n[steps.a]\ncommand = ["sh", "-c", "echo no; exit 4"]\n'
    )
    ran = call("pipeline", "run", "p.toml")
    assert ran.exit_code == 1 and "a: failed: exit code 4: no" in ran.stdout
    assert "logs:" in call("pipeline", "show", "p.toml").stdout


def test_a_run_that_waits_is_cancelled() -> None:
    call("pipeline", "run", "p.toml")
    assert "run 1 is cancelled" in call("pipeline", "cancel", "p.toml").stdout
    assert "is cancelled already" in call("pipeline", "cancel", "p.toml").stdout


def test_the_last_validation_loss_of_a_run_becomes_scores() -> None:
    folder = Path("run/metrics")
    folder.mkdir(parents=True)
    missing = call("pipeline", "scores", "run", "--out", "scores.json")
    assert missing.exit_code == 1 and "has no validation loss" in missing.output
    lines = [{"step": step, "loss": loss} for step, loss in ((5, 4.0), (10, 3.5))]
    (folder / "validation.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    call("pipeline", "scores", "run", "--out", "scores.json")
    assert json.loads(Path("scores.json").read_text()) == {
        "checkpoint": "run",
        "step": 10,
        "scores": {"validation.loss": 3.5},
    }


def test_a_checkpoint_is_registered_by_hand_and_an_export_is_copied() -> None:
    Path("checkpoint").mkdir()
    Path("checkpoint/weights").write_text("w")
    Path("hf").mkdir()
    Path("hf/config.json").write_text("{}")
    made = call("models", "register", "toy", "--checkpoint", "checkpoint", "--export", "hf")
    assert "toy 1 is a candidate" in made.stdout
    assert call("models", "export", "toy", "copy").exit_code == 0
    assert Path("copy/config.json").read_text() == "{}"
    assert "give a FOLDER, or --mlflow" in call("models", "export", "toy").output
    again = call("models", "export", "toy", "copy")
    assert again.exit_code == 1 and "exists already" in again.output
    assert "has no model other" in call("models", "show", "other").output
