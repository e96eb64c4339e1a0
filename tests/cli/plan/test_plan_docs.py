"""The planner's pages: every example runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from phalanx.cli.app import app
from phalanx.hardware import cluster
from phalanx.plan.question.request import PlanRequest, understand

DOCS = Path(__file__).parents[3] / "docs"
NAMES = ("how-to/plan-a-run.md", "how-to/compare-plans.md", "concepts/planner.md")
PAGE = "\n".join((DOCS / name).read_text(encoding="utf-8") for name in NAMES)
COMMANDS = [
    line.split("|")[0].removeprefix("$ phalanx ").strip()
    for line in PAGE.splitlines()
    if line.startswith("$ phalanx ")
]


# A fit with its validation takes most of a minute.
PARAMETERS = [
    pytest.param(command, marks=pytest.mark.soak) if "calibrate" in command else command
    for command in COMMANDS
]


@pytest.mark.parametrize("command", PARAMETERS)
def test_an_example_of_the_page_runs(command: str, tmp_path: Path) -> None:
    words = shlex.split(command.replace("/tmp/", f"{tmp_path}/"))
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output


def test_the_page_shows_examples() -> None:
    assert len(COMMANDS) >= 5


def test_the_cluster_file_of_the_page_is_a_cluster(tmp_path: Path) -> None:
    text = re.search(r"```toml\n(# site.toml.*?)```", PAGE, re.DOTALL)
    assert text is not None
    path = tmp_path / "site.toml"
    path.write_text(text[1], encoding="utf-8")
    assert cluster(str(path)).gpus == 2048
    understand(PlanRequest(model="llama3-70b", cluster=str(path), tokens="1T"))


def test_the_library_example_of_the_page_runs() -> None:
    text = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert text is not None
    exec(compile(text[1], "docs/concepts/planner.md", "exec"), {})
