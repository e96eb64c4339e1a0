"""The examples of docs/server.md run as they stand."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.control.servers import ServerProcess

PAGE = Path(__file__).parents[2] / "docs" / "server.md"


def examples(language: str) -> list[str]:
    text = PAGE.read_text().partition("## The API")[2]
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def environment(server: ServerProcess) -> dict[str, str]:
    return {**os.environ, "PHALANX_STATE": str(server.state), "PHALANX_SERVER": server.url}


def test_the_shell_examples_run(server: ServerProcess, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    (script,) = examples("sh")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=tmp_path,
        env=environment(server),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert '"SetQuota"' in done.stdout and '"accepted":true' in done.stdout


def test_the_python_example_runs(server: ServerProcess) -> None:
    (script,) = examples("python")
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment(server),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "healthy" in done.stdout and "[]" in done.stdout


def test_every_command_of_the_table_exists() -> None:
    from phalanx.cli.app import COMMANDS

    table = PAGE.read_text().partition("| command |")[2].partition("All print JSON")[0]
    named = {
        word for line in re.findall(r"^\| (.*?) \|", table, re.MULTILINE) for word in _words(line)
    }
    assert len(named) > 12 and named <= set(COMMANDS)


def _words(cell: str) -> list[str]:
    return [code.split()[0] for code in re.findall(r"`([^`]+)`", cell)]
