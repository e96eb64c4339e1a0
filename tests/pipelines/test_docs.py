"""The pipelines that pages and examples show are right, and the small one runs as it stands."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from phalanx.cluster.pipelines.rules import KEYS
from phalanx.config import load_job
from phalanx.data.prepare.recipe import load_recipe
from phalanx.pipelines.run.session import open_pipeline

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "pipelines.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    found = re.search(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def test_the_first_pipeline_of_the_page_runs_and_is_cached(tmp_path: Path) -> None:
    tomllib.loads(block("toml"))
    (tmp_path / "pipeline.toml").write_text(block("toml"))
    called = f'phalanx() {{ {shlex.quote(sys.executable)} -m phalanx "$@"; }}\nset -e\n'
    done = subprocess.run(
        ["bash", "-c", called + block("sh")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "run 1 is done: 5 done" in done.stdout and "3 cached" in done.stdout
    assert "count[letter=a].share is" in done.stdout


def test_the_example_is_a_pipeline_whose_job_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    tasks = open_pipeline(Path("examples/pipeline.toml")).tasks.in_order
    load_job("examples/pipeline-job.toml")
    kinds = [task.step.kind for task in tasks]
    assert kinds.count("train") == kinds.count("eval") == 3 and kinds[-1] == "register"
    command = tasks[kinds.index("data")].step.command
    overrides = [word.replace("{", "").replace("}", "") for word in command[3::2]]
    assert command[0] == "prepare" and set(command[2::2]) == {"--set"}
    load_recipe(ROOT / "examples/pipeline-recipe.toml", overrides)


def test_the_page_names_every_kind_of_step() -> None:
    assert [kind for kind in KEYS if f"`{kind}`" not in PAGE] == []
