"""Variables that are given with a job."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from phalanx.cli.jobs.environment import variables
from phalanx.config import ConfigError
from phalanx.control.server.http.submission import program_name


def test_files_come_first_options_win_and_bare_names_are_taken_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HERE", "as it is")
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text('# comment\n\nA=1\nexport B="two words"\nURL=sqlite:///x?y=z#a\n')
    second.write_text("A=2\nEMPTY=\n")
    assert variables(["B=3", "HERE"], [first, second]) == {
        "A": "2",
        "B": "3",
        "URL": "sqlite:///x?y=z#a",
        "EMPTY": "",
        "HERE": "as it is",
    }


def test_what_is_exported_is_as_it_is_here_and_weaker_than_what_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in list(os.environ):
        monkeypatch.delenv(name)
    here = {"TOKEN": "t", "PATH": "/bin", "HOME": "/me", "PHALANX_JOB": "1", "SSH_TTY": "x"}
    for name, value in here.items():
        monkeypatch.setenv(name, value)
    assert variables([], [], "ALL") == {"TOKEN": "t", "PATH": "/bin"}
    assert variables(["PATH=/usr/bin"], [], "PATH, HOME") == {"PATH": "/usr/bin", "HOME": "/me"}
    with pytest.raises(ConfigError, match="NOT_HERE is not set"):
        variables([], [], "PATH,NOT_HERE")


@pytest.mark.parametrize("text", ["", "=1", "1A=2", "A B=1", "NOT_SET_ANYWHERE", "A=\0"])
def test_what_is_no_variable_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        variables([text], [])


@pytest.mark.parametrize("content", [b"A\n", b"two words=1\n", b"\xff\xfe", None])
def test_a_file_that_holds_no_variables_is_named_with_its_line(
    tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "given.env"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"given\.env"):
        variables([], [path])


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("sleep 150", "sleep"),
        ("/usr/bin/python3.11 -u src/train.py --config a.yaml", "train.py"),
        ("python -m torchtitan.train --x", "torchtitan.train"),
        ("torchrun --nproc-per-node 8 finetune.py", "finetune.py"),
        ("accelerate launch run.py", "run.py"),
        ("bash ./job.sh", "job.sh"),
        ("python -c pass", "python"),
        ("./run.py a.py", "run.py"),
    ],
)
def test_a_program_is_called_by_its_script(command: str, name: str) -> None:
    assert program_name(tuple(command.split())) == name
