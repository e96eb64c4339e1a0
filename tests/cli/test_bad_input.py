"""What is wrong is said in words, whichever command is given it: no traceback reaches a person."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from phalanx.cli.app import app
from tests.commands import run_phalanx
from tests.ports import free_port

ASKING = [
    "ps",
    "show 1",
    "why 1",
    "logs 1",
    "logs -f 1",
    "cancel 1",
    "scale 1 2",
    "nodes",
    "drain n1",
    "resume n1",
    "events",
    "answer",
    "quota",
    "top",
    "page",
    "runs ls",
    "runs show 1",
    "runs note 1 hi",
    "runs tag 1 a",
    "ledger",
    "token list",
    "shell 1",
    "submit -- true",
    "submit --dry-run -- true",
]


@pytest.mark.parametrize("address", ["foo", "http://h:abc", "http://127.0.0.1:{port}"])
@pytest.mark.parametrize("command", ASKING)
def test_a_server_that_is_none_is_told_in_words(
    command: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_TOKEN", "x")
    words, _, program = command.partition(" -- ")
    url = address.format(port=free_port())
    arguments = [*words.split(), "--server", url, *(["--", program] if program else [])]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 3 and isinstance(result.exception, SystemExit)
    assert result.stderr.startswith("error: ") and "Errno" not in result.stderr


MISSING = [
    "train {0}.toml",
    "config check {0}.toml",
    "plan --model {0}.toml --cluster h100-64",
    "simulate show {0}.toml",
    "data tokenize {0} --out {0}.out --vocab-size 300",
    "data inspect {0}",
    "ckpt show {0}",
    "ckpt export {0} {0}.out",
    "convert import-hf {0} {0}.out",
    "convert export-hf {0} {0}.out",
    "submit {0}.toml",
    "runs show {0}",
    "runs ls --runs {0}",
    "up --policy {0}.toml",
    "sweep plan {0}.toml",
    "sweep run {0}.toml",
    "pipeline run {0}.toml",
    "pipeline plan {0}.toml",
    "tune {0}.toml",
    "parity {0}.toml",
    "profile {0}.toml",
]


@pytest.mark.parametrize("command", MISSING)
def test_a_file_that_is_not_there_is_told_in_words(command: str, tmp_path: Path) -> None:
    arguments = command.format(tmp_path / "missing").split()
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code not in (0, 1) and isinstance(result.exception, SystemExit)
    assert "missing" in result.stderr.replace("\n", "")


# A folder, and a file that is no text, each where a file of text is asked for.
WRITTEN_BY_HAND = [
    "train {0}",
    "plan --model llama3-8b --cluster {0}",
    "plan --model llama3-8b --cluster h100-64 --constants {0}",
    "plan check {0}",
    "simulate trace {0}",
    "sweep plan {0}",
    "pipeline run {0}",
    "data prepare {0}",
    "submit --dry-run --env-file {0} -- true",
]


@pytest.mark.parametrize("command", WRITTEN_BY_HAND)
def test_a_path_of_another_kind_is_told_without_the_system_s_numbers(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_TOKEN", "x")
    folder, binary = tmp_path / "folder.toml", tmp_path / "binary.toml"
    folder.mkdir()
    binary.write_bytes(b"\xff\xfe\x00")
    for path, reason in ((folder, "Is a directory"), (binary, "it is not text in UTF-8 (byte 0)")):
        result = CliRunner().invoke(app, command.format(path).split())
        assert result.exit_code == 2 and isinstance(result.exception, SystemExit)
        assert f"{reason}; " in result.stderr and "Errno" not in result.stderr
        assert result.stderr.count(str(path)) == 1


@pytest.mark.parametrize("place", ["/sys", "file"])  # nobody may write there, nor below a file
@pytest.mark.parametrize(
    "command",
    [
        "story slow-steps --into {0}/x",
        "data tokenize file --vocab-size 300 --out {0}/x",
        "data train-tokenizer file --vocab-size 300 --out {0}/x/t.json",
        "models register x --checkpoint file --registry {0}/x",
        "new model own --into {0}/x",
    ],
)
def test_a_place_that_nobody_may_write_to_is_told_with_a_way_out(
    command: str, place: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("some text\n" * 1000)
    done = run_phalanx(*command.format(place).split(), folder=tmp_path)
    assert done.returncode in (1, 2) and done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr and "Errno" not in done.stderr


@pytest.mark.parametrize(
    "command",
    [
        f"tune {Path(__file__).parents[2]}/examples/tiny.toml --write {{0}}",
        "eval run --tasks piqa --out {0}",
        "doctor fabric --picture {0}",
        "plan calibrate --measure --out {0}",
    ],
)
def test_a_folder_in_the_place_of_a_result_is_refused_before_the_work(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (folder := tmp_path / "made.svg").mkdir()
    result = CliRunner().invoke(app, command.format(folder).split(), env={"COLUMNS": "300"})
    assert result.exit_code == 2 and f"{folder} is a folder: name a file" in result.stderr
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize(
    ("command", "next_one"),
    [
        ("submitt job.toml", "did you mean 'submit'?"),
        ("nosuchcommand", "`phalanx help` finds one by its topic"),
        ("audit", "has no audit log: name a server's state folder with --state"),
        ("show abc", "next: `phalanx ps --all` lists jobs"),
    ],
)
def test_what_is_not_known_comes_with_what_to_type_next(
    command: str, next_one: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHALANX_STATE", str(tmp_path))
    result = CliRunner().invoke(app, command.split(), env={"COLUMNS": "300"})
    assert result.exit_code in (1, 2) and next_one in result.stderr


def test_an_option_that_changes_nothing_is_refused(tmp_path: Path) -> None:
    words = ["ckpt", "export", str(tmp_path), str(tmp_path / "out"), "--to", "dcp", "--ema"]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "300"})
    assert result.exit_code == 2 and "leave --ema out" in result.stderr


@pytest.mark.parametrize("command", ["--help", "config explain", "submit --dry-run -- sleep 1"])
def test_a_reader_that_leaves_ends_a_command_quietly(command: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "phalanx", *command.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    with process:
        process.stdout.close()
        told = process.stderr.read()
    assert told == ""
