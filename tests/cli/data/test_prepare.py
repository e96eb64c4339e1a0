"""``phalanx data prepare`` and ``rules`` as a user, a script and an engine call them."""

from __future__ import annotations

from pathlib import Path

import msgspec
from typer.testing import CliRunner

from phalanx.cli.data.data import app
from phalanx.data import read_manifest
from phalanx.data.prepare.output.summary import PrepareReport
from phalanx.data.prepare.rules import RULES
from tests.data.prepare.raw import recipe_file, write_raw


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.stdout, result.stderr


def test_a_recipe_is_made_shown_and_not_made_twice(tmp_path: Path) -> None:
    write_raw(tmp_path / "raw")
    path = recipe_file(tmp_path, "[deduplicate]\nnear = false\n")
    code, text, error = run("prepare", path, "--workers", 1)
    assert code == 0
    assert "exact duplicates: 2 dropped, 43 left" in text and "masked: 1 email, 1 ip" in text
    assert "filter: 3 of 3 units\n" in error
    code, text, _ = run("prepare", path, "--workers", 1, "--json")
    assert code == 0
    report = msgspec.json.decode(
        msgspec.json.encode(msgspec.json.decode(text)["report"]), type=PrepareReport
    )
    assert report.fingerprint == read_manifest(tmp_path / "out").fingerprint
    assert msgspec.json.decode(text)["unchanged"] is True
    code, _, error = run("prepare", path, "--set", 'filter.rules=["c4"]')
    assert code == 2 and "--force" in error


def test_mistakes_end_with_two_and_a_sentence(tmp_path: Path) -> None:
    path = recipe_file(tmp_path)
    code, _, error = run("prepare", path)
    assert code == 2 and "matches nothing" in error
    assert run("prepare")[0] == 2
    code, _, error = run("prepare", "--unit", "filter.json")
    assert code == 2 and "TASK/TASKS" in error
    code, text, _ = run("prepare", path, "--set", "read.inputs=3", "--json")
    assert code == 2 and msgspec.json.decode(text)["problems"][0]["key"] == "read.inputs"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    write_raw(tmp_path / "raw")
    (tmp_path / "file").touch()
    code, _, error = run("prepare", recipe_file(tmp_path), "--set", f"out={tmp_path}/file/out")
    assert code == 1 and error.startswith("error: ") and f"{tmp_path}/file" in error


def test_rules_are_listed_with_thresholds_and_sources() -> None:
    code, text, _ = run("rules")
    assert code == 0 and all(name in text for name in RULES)
    assert "gopher.word_count (least = 50, most = 100000)" in text and "arXiv 2112.11446" in text
    code, text, _ = run("rules", "--json")
    assert [rule["name"] for rule in msgspec.json.decode(text)] == list(RULES)
