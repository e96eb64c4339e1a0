"""Whoever follows a tutorial sees what it shows."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.config import check
from phalanx.config.load import job_from_table

ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"
BLOCK = re.compile(r"```console\n\$ (?P<command>[^\n]+)\n(?P<shown>.*?)```", re.DOTALL)
RUN = re.compile(r"(?P<name>\w+)/(?P<id>\d{8}-\d{6}-[0-9a-f]{6})")
REFUSED = "error: "


def steps(name: str) -> list[tuple[str, str]]:
    """Commands of a tutorial and what it shows below each."""
    text = (TUTORIALS / name).read_text(encoding="utf-8")
    return [(each["command"], each["shown"]) for each in BLOCK.finditer(text)]


def missing(shown: str, printed: str) -> list[str]:
    """Lines that are shown and were not printed, whatever their numbers and blanks."""
    lines = [form(line) for line in printed.splitlines()]
    return [
        line
        for line in shown.splitlines()
        if line.strip() not in ("", "…") and form(line) not in lines
    ]


def form(line: str) -> str:
    """A line without what differs from run to run."""
    line = re.sub(r"\(held up [^)]*\)", "(held up)", RUN.sub(r"\g<name>/ID", line))
    return re.sub(r"[\s─]+", " ", re.sub(r"\d[\d,.:]*", "N", line)).strip()


def with_own_runs(command: str, folder: Path, seen: dict[str, str]) -> str:
    """The command with the ids of the runs that were made here, in the order of the tutorial's."""
    for run in RUN.finditer(command):
        made = sorted(path.name for path in (folder / "runs" / run["name"]).iterdir())
        seen.setdefault(run["id"], made[len(seen)])
        command = command.replace(run["id"], seen[run["id"]])
    return command


def jobs(name: str) -> Iterator[tuple[str, str]]:
    """Files that the reader is told to save."""
    text = (TUTORIALS / name).read_text(encoding="utf-8")
    yield from re.findall(r"Save this as `([\w.]+)`.*?```toml\n(.*?)```", text, re.DOTALL)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["first-run.md", "first-corpus.md", "../how-to/evaluate.md"])
def test_a_tutorial_shows_what_its_commands_print(name: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    for file, text in jobs(name):
        (tmp_path / file).write_text(text)
    program = tmp_path / "bin" / "phalanx"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m phalanx "$@"\n')
    program.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(tmp_path),
        "COLUMNS": "200",
        "NO_COLOR": "1",
    }
    seen: dict[str, str] = {}
    for command, shown in steps(name):
        done = subprocess.run(
            with_own_runs(command, tmp_path, seen),
            shell=True,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert (done.returncode != 0) == shown.startswith(REFUSED), f"{command}: {done.stderr}"
        assert missing(shown, done.stdout + done.stderr) == [], command


@pytest.mark.parametrize("name", sorted(path.name for path in TUTORIALS.glob("*.md")))
def test_a_tutorial_shows_output_and_its_jobs_are_accepted(name: str) -> None:
    assert len(steps(name)) >= 5
    for _, text in jobs(name):
        check(job_from_table(tomllib.loads(text)), 2)


def test_only_the_form_of_a_line_counts() -> None:
    shown = "step 1/20  loss 8.35\n…\nall in runs/tiny/20260101-120000-abc123\n"
    assert missing(shown, "step 7/9 loss 1.2\nall in runs/tiny/20270101-120000-ffffff") == []
    assert missing(shown, "step 7/9 loss 1.2") == ["all in runs/tiny/20260101-120000-abc123"]
