"""Every benchmark command that documents, Makefile and scripts name starts."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from benchmarks import tune
from phalanx.config import check, job_from_table, resolve
from tests.commands import run_module

ROOT = Path(__file__).parents[2]
COMMAND = re.compile(r"python ((?:-m benchmarks\.|benchmarks/)[a-z_]+(?:\.py)?)([^\n`;|#]*)")


def documented() -> dict[str, set[str]]:
    """Script or module as it is called, and every option that a document gives it."""
    texts = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "Makefile"]
    texts += [*ROOT.glob("benchmarks/*.md"), *ROOT.glob("benchmarks/*.py")]
    found: dict[str, set[str]] = {}
    for text in texts:
        for command, rest in COMMAND.findall(text.read_text()):
            options = found.setdefault(command, set())
            options.update(re.findall(r"(?<![\w-])--[a-z][a-z-]*", rest))
    return found


def test_every_script_that_can_be_run_is_documented() -> None:
    named = {re.split(r"[./]", command.removesuffix(".py"))[-1] for command in documented()}
    runnable = {
        path.stem
        for path in ROOT.glob("benchmarks/*.py")
        if '__name__ == "__main__"' in path.read_text()
    }
    assert runnable - named == {"torchft_replica"}  # a process that recovery starts


@pytest.mark.parametrize("command", sorted(documented()))
def test_a_documented_command_starts_and_knows_its_options(command: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    words = [*shlex.split(command), "--help"]
    if words[0] == "-m":
        done = run_module(*words[1:], environment=environment, folder=ROOT)
    else:  # a file that is started by its path has another sys.path
        done = subprocess.run(
            [sys.executable, *words],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout
    assert not [option for option in documented()[command] if option not in done.stdout]


def job_files() -> dict[str, str]:
    """Job files that stand in benchmarks, by their place; what is filled in is left out."""
    found: dict[str, str] = {}
    for path in sorted(ROOT.glob("benchmarks/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and re.search(r"^\[(train|model|data)\]$", text, re.MULTILINE):
                fixed = [line for line in text.splitlines() if "{" not in line]
                found[f"{path.name}:{node.lineno}"] = "\n".join(fixed)
    return found


def test_job_files_of_benchmarks_know_the_settings() -> None:
    texts = job_files()
    assert len(texts) >= 2
    for text in texts.values():
        job_from_table(tomllib.loads(text))


@pytest.mark.parametrize("settings", [tune.BAD + tune.BAD_DEMO, tune.HAND], ids=["bad", "hand"])
def test_the_jobs_that_tuning_is_measured_on_can_start(settings: tuple[str, ...]) -> None:
    table = tomllib.loads(tune.DEMO.read_text())
    check(resolve(job_from_table(table, [*tune.SYNTHETIC, *settings]), 4), 4)
