"""The command line: what is printed, what is refused, and with which exit code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

import phalanx.cli
from phalanx import __version__
from phalanx.cli.app import COMMANDS, PANELS, app
from phalanx.config import PRESETS, load_job


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text('[model]\npreset = "tiny"\n[train]\ndevice = "cpu"\n', encoding="utf-8")
    return path


def test_version_is_printed() -> None:
    assert run("--version").stdout == f"phalanx {__version__}\n"


def test_help_lists_every_command() -> None:
    text = run("--help").stdout
    assert all(name in text for name in COMMANDS)


def test_help_groups_commands_by_what_people_do() -> None:
    text = run("--help").stdout
    titles = [line.strip("╭─╮ ") for line in text.splitlines() if line.startswith("╭")]
    assert titles == ["Options", *PANELS]
    jobs = text.partition("─ Jobs ─")[2].partition("╭")[0]
    assert all(f" {name} " in jobs for name in PANELS["Jobs"]) and " train " not in jobs


def test_the_file_of_a_command_has_its_name() -> None:
    folder = Path(phalanx.cli.__file__).parent
    for panel, commands in PANELS.items():
        for name in commands:
            assert (folder / panel.lower() / f"{name.replace('-', '_')}.py").is_file(), name


@pytest.mark.parametrize("arguments", [["--help"], [], ["--version"]])
def test_what_is_said_of_all_commands_imports_none(arguments: list[str]) -> None:
    script = (
        "import sys\n"
        "from phalanx.cli.app import app\n"
        f"try: app({arguments!r})\n"
        "except SystemExit: pass\n"
        "loaded = {name for name in sys.modules if name.startswith('phalanx.')}\n"
        "assert loaded == {'phalanx.cli', 'phalanx.cli.app'}, loaded\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("tr", "train"), ("dr", "drain"), ("runs sh", "show"), ("submit --dry", "--dry-run")],
)
def test_the_shell_completes_commands_and_options(typed: str, offered: str) -> None:
    words = ["phalanx", *typed.split()]
    completing = {
        "_PHALANX_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }
    call = "import sys; sys.argv = ['phalanx']; from phalanx.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", call],
        env=os.environ | completing,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert offered in done.stdout.split()


def test_the_completion_of_a_shell_is_printed() -> None:
    call = "import sys; sys.argv[0] = 'phalanx'; from phalanx.cli import main; main()"
    command = [sys.executable, "-c", call, "--show-completion", "bash"]
    # Whatever starts the tests need not be a shell.
    named = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=named)
    assert done.returncode == 0 and "_PHALANX_COMPLETE" in done.stdout


def test_an_unknown_command_is_refused() -> None:
    assert run("trian").exit_code == 2


def test_a_preset_is_shown_as_toml_that_loads(tmp_path: Path) -> None:
    shown = tmp_path / "shown.toml"
    shown.write_text(run("config", "show", "--preset", "llama3-8b").stdout, encoding="utf-8")
    assert load_job(shown).model == PRESETS["llama3-8b"]


def test_an_unknown_preset_is_refused_with_the_nearest() -> None:
    result = run("config", "show", "--preset", "llama-8b")
    assert result.exit_code == 2
    assert 'did you mean "llama3-8b"' in result.stderr


def test_a_job_is_shown_resolved_for_its_world_size(job: Path) -> None:
    result = run(
        "config", "show", str(job), "--world-size", "8", "--set", "parallel.tensor=2", "--json"
    )
    shown = json.loads(result.stdout)
    assert (shown["parallel"]["data"], shown["model"]["dim"]) == (4, 128)


def test_show_without_a_job_prints_the_defaults() -> None:
    assert "learning_rate = 0.0003" in run("config", "show").stdout


def test_check_accepts_a_good_job(job: Path) -> None:
    result = run("config", "check", str(job), "--world-size", "4")
    assert result.exit_code == 0
    assert "fine on 4 ranks" in result.stdout


def test_check_prints_every_problem_and_exits_with_2(job: Path) -> None:
    bad = ["--set", "parallel.tensor=3", "--set", "schedule.kind=wsd"]
    result = run("config", "check", str(job), *bad)
    assert result.exit_code == 2
    assert "parallel.tensor = 3" in result.stderr
    assert "schedule.decay_steps = 0" in result.stderr


def test_check_as_json_gives_key_value_rule_and_fix(job: Path) -> None:
    result = run("config", "check", str(job), "--set", "parallel.pipeline=9", "--json")
    (found, *_) = json.loads(result.stdout)["problems"]
    assert result.exit_code == 2
    assert found["key"] == "parallel.pipeline" and found["value"] == "9"
    assert found["rule"] and "start 4 ranks with parallel.pipeline = 4" in found["fix"]


def test_explain_prints_meaning_values_and_default() -> None:
    text = run("config", "explain", "parallel.schedule").stdout
    assert "zero-bubble" in text and 'default "1f1b"' in text


def test_explain_as_json_is_one_entry_a_key() -> None:
    docs = json.loads(run("config", "explain", "train", "--json").stdout)
    assert {doc["key"] for doc in docs} >= {"train", "train.steps"}


@pytest.mark.parametrize("columns", [40, 80])
def test_explanations_fit_the_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = run("config", "explain").stdout.splitlines()
    assert len(lines) > 200
    # A key or a value without blanks is never broken.
    assert all(len(line) <= columns for line in lines if " " in line.strip())


def every_command(group: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    commands = group.list_commands(None) if hasattr(group, "list_commands") else []
    for word in commands:
        yield from every_command(group.get_command(None, word), f"{name} {word}".strip())
    if not commands:
        yield name, group


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_help_spells_options_out_in_a_terminal_of_any_width(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for name, command in every_command(typer.main.get_command(app)):
        text = run(*name.split(), "--help").stdout
        shown = (each for each in command.params if not getattr(each, "hidden", False))
        options = [option for each in shown for option in each.opts if option[:2] == "--"]
        assert [option for option in options if option not in text] == [], name


def test_every_command_can_report_in_json() -> None:
    found = dict(every_command(typer.main.get_command(app)))
    assert {"train", "demo", "config check", "data inspect"} <= set(found)
    for serving in ("agent", "lead", "shell"):  # until they are stopped; a shell's user reads
        del found[serving]
    for asking in ("doctor apply", "doctor undo"):  # a person says yes to what stands there
        del found[asking]
    for name, command in found.items():
        options = [option for parameter in command.params for option in parameter.opts]
        assert "--json" in options, name


def test_check_opens_the_files_that_a_job_names_unless_told_not_to(job: Path) -> None:
    corpus = ["--set", "data.source=shards", "--set", "data.path=/no/such/corpus"]
    refused = run("config", "check", str(job), *corpus)
    assert refused.exit_code == 2 and "data.path = /no/such/corpus" in refused.stderr
    accepted = run("config", "check", str(job), *corpus, "--no-files")
    assert accepted.exit_code == 0 and "not looked at" in accepted.stdout


EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_rank_that_no_usual_gpu_holds_is_said_with_what_would_help() -> None:
    job = str(EXAMPLES / "llama3-405b.toml")
    fits = run("config", "check", job, "--no-files")
    assert fits.exit_code == 0 and "does not fit" not in fits.stderr
    wide = ["--set", "parallel.context=1", "--set", "parallel.data=128"]
    wide += ["--set", "data.sequence=9216"]
    result = run("config", "check", job, "--no-files", *wide)
    assert result.exit_code == 0
    assert "does not fit h100 (80 GiB), h200 (141 GiB); it fits b200" in result.stderr
    assert 'what would help: memory.recompute = "full"' in result.stderr
    told = json.loads(run("config", "check", job, "--no-files", *wide, "--json").stdout)["memory"]
    assert told["rank_bytes"] > 141 * 2**30 and told["changes"][0]["rank_bytes"] < 80 * 2**30


@pytest.mark.parametrize("name", ["llama3-405b", "dense-1t"])
def test_the_large_examples_fit_gpus_of_80_gb(name: str) -> None:
    told = json.loads(
        run("config", "check", str(EXAMPLES / f"{name}.toml"), "--no-files", "--json").stdout
    )
    assert told["memory"]["rank_bytes"] < 80 * 2**30 and not told["memory"]["too_small"]


@pytest.mark.parametrize("key", ["checkpoint.resume", "checkpoint.load_hf"])
def test_check_misses_a_start_that_is_not_there(job: Path, key: str) -> None:
    result = run("config", "check", str(job), "--set", f"{key}=/no/such/folder")
    assert result.exit_code == 2
    assert f"error: {key} = " in result.stderr


@pytest.mark.parametrize("mode", [[], ["--dry-run"]])
def test_train_refuses_a_bad_job_before_anything_starts(job: Path, mode: list[str]) -> None:
    result = run("train", str(job), "--world-size", "3", "--set", "parallel.tensor=2", *mode)
    assert result.exit_code == 2
    assert "world size = 3" in result.stderr
    assert not (job.parent / "runs").exists()


def test_a_bad_job_is_refused_without_importing_torch(job: Path) -> None:
    script = (
        "import sys\n"
        "from phalanx.cli.app import app\n"
        f"arguments = ['train', {str(job)!r}, '--set', 'parallel.tensor=3']\n"
        "try: app(arguments)\n"
        "except SystemExit as end: assert end.code == 2, end.code\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def test_a_job_and_its_files_are_checked_without_importing_torch(job: Path) -> None:
    script = (
        "import sys\n"
        "from phalanx.cli.app import app\n"
        f"try: app(['config', 'check', {str(job)!r}, '--set', 'checkpoint.resume=auto'])\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def test_commands_that_messages_and_pages_name_exist() -> None:
    root = Path(__file__).parents[2]
    files = [*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("phalanx/**/*.py")]
    named = {
        (word, str(path.relative_to(root)))
        for path in files
        for word in re.findall(r"[`(:] ?phalanx ([a-z][a-z0-9-]+)", path.read_text("utf-8"))
    }
    assert len(named) > 100
    assert [each for each in sorted(named) if each[0] not in COMMANDS] == []
