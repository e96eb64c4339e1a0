"""The script that mends: readable, runs only what it shows, and takes it back."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from phalanx.config import ConfigError
from phalanx.doctor.checks.check import write, write_all
from phalanx.doctor.checks.fix import booted_since, commands_of, fix_script, run_commands
from phalanx.doctor.finding import Finding, MendStep


def finding(check: str, *steps: MendStep, suggestion: str = "", fact: str = "x") -> Finding:
    return Finding(
        check=check,
        verdict="warn",
        measured={"value": fact},
        expected="another",
        suggestion=suggestion,
        severity="low",
        why="It costs.",
        steps=steps,
    )


def written(folder: Path, *findings: Finding, node: str = "here") -> Path:
    script = folder / "fix.sh"
    script.write_text(fix_script(node, findings))
    return script


Run = Callable[[Path, Literal["apply", "undo"]], int]


def by_doctor(script: Path, action: Literal["apply", "undo"]) -> int:
    return run_commands(commands_of(script, "here", action))


def by_shell(script: Path, action: Literal["apply", "undo"]) -> int:
    return subprocess.run(["sh", str(script), action], check=False).returncode


EITHER_WAY = pytest.mark.parametrize("run_script", [by_doctor, by_shell])


@EITHER_WAY
def test_what_is_applied_is_undone_in_the_other_order(tmp_path: Path, run_script: Run) -> None:
    one, two = tmp_path / "one", tmp_path / "it's two"
    one.write_text("old\n")
    two.write_text("before\n")
    quoted = "'" + str(two).replace("'", "'\"'\"'") + "'"
    script = written(
        tmp_path,
        finding("os.a", MendStep(f"echo new > {one}", f"echo old > {one}")),
        finding(
            "os.b",
            MendStep(f"cat {one} > {quoted}", f"cat {one} > {quoted}.seen; echo before > {quoted}"),
        ),
    )
    assert run_script(script, "apply") == 0
    assert (one.read_text(), two.read_text()) == ("new\n", "new\n")
    assert run_script(script, "undo") == 0
    assert (one.read_text(), two.read_text()) == ("old\n", "before\n")
    assert Path(f"{two}.seen").read_text() == "new\n"  # the last was undone first


@EITHER_WAY
def test_a_command_that_fails_is_told_and_the_others_run(tmp_path: Path, run_script: Run) -> None:
    made = tmp_path / "made"
    script = written(
        tmp_path,
        finding("os.a", MendStep("false", "true")),
        finding("os.b", MendStep(f"touch {made}", "true")),
    )
    assert run_script(script, "apply") == 1
    assert made.exists()
    assert run_script(script, "undo") == 0


@EITHER_WAY
def test_nothing_runs_for_what_only_a_person_can_mend(tmp_path: Path, run_script: Run) -> None:
    script = written(
        tmp_path,
        finding("os.a", suggestion="boot again"),
        finding("os.good").__class__(check="os.good", verdict="pass"),
    )
    assert commands_of(script, "here", "apply") == []
    text = script.read_text()
    assert "# os.a: boot again" in text and "os.good" not in text
    assert run_script(script, "apply") == 0


@EITHER_WAY
def test_what_was_read_of_a_machine_cannot_leave_its_comment(
    tmp_path: Path, run_script: Run
) -> None:
    hostile = finding("os.a", MendStep("true", "true"), fact=f"x\ntouch {tmp_path}/owned\n#")
    script = written(tmp_path, hostile, finding("os.b", suggestion=f"y\ntouch {tmp_path}/owned"))
    assert run_script(script, "apply") == 0
    assert not (tmp_path / "owned").exists()


def test_what_was_read_of_a_machine_hides_nothing_from_who_reads_the_script(
    tmp_path: Path,
) -> None:
    erased = "x\x1b[2K\x1b[1A\r\x9b2K"
    hostile = finding("os.a", MendStep("true", "true"), suggestion=erased, fact=erased)
    text = written(tmp_path, hostile, finding("os.b", suggestion=erased), node=erased).read_text()
    assert all(letter.isprintable() or letter == "\n" for letter in text)


def test_a_name_that_somebody_gave_an_interface_is_no_command() -> None:
    path = "/sys/class/net/$(touch x)/ecn/roce_np/enable/3"
    (one,) = write({path: "0"}, "1")
    assert one.do == f"echo 1 > '{path}'"
    several = write_all(["/sys/a*/b", "/sys/c;d/e"], "0", "1")[0]
    assert several.do == "echo 1 | tee /sys/a*/b '/sys/c;d/e' > /dev/null"


def test_a_script_knows_whether_the_node_has_booted_since(tmp_path: Path) -> None:
    """Settings are as they were then, and names of devices may be others'."""
    script = tmp_path / "fix.sh"
    script.write_text(fix_script("here", [], boot="one"))
    assert booted_since(script, "two") and not booted_since(script, "one")
    assert not booted_since(script, "")  # this kernel does not say
    script.write_text(fix_script("here", []))  # of a recorded machine, or an older release
    assert not booted_since(script, "two")
    assert commands_of(script, "here", "undo") == []


def test_what_no_command_can_do_stands_beside_the_commands(tmp_path: Path) -> None:
    step = MendStep("nvidia-smi -e 1", "nvidia-smi -e 0")
    script = written(tmp_path, finding("os.a", step, suggestion="nvidia-smi -e 1; then reset it"))
    assert "    # mind: then reset it\n" in script.read_text()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("set -u\n", "set -u\nrm -rf /x\n"),
        ("    step 'echo 1 > /x'", "    step 'echo 1 > /x'; rm -rf /x"),
        ("    step 'echo 1 > /x'", '    step "$(rm -rf /x)"'),
        ("undo() {", "apply() {"),
        ('exit "$failed"\n', ""),
        ("undo() {", "    step 'rm -rf /x'\nundo() {"),
        ('exit "$failed"\n', "exit \"$failed\"\n    step 'rm -rf /x'\n"),
        ("set -u\n", "    step 'rm -rf /x'\nset -u\n"),
        ("    step 'echo 1 > /x'", "    step 'rm -rf /x \x1b[2K\x1b[1A'"),
        ("    step 'echo 1 > /x'", "    step 'rm -rf /x \u202e'"),
    ],
)
def test_a_script_with_a_line_that_would_not_be_shown_is_refused(
    tmp_path: Path, old: str, new: str
) -> None:
    script = written(tmp_path, finding("os.a", MendStep("echo 1 > /x", "echo 0 > /x")))
    script.write_text(script.read_text().replace(old, new))
    with pytest.raises(ConfigError, match="not as doctor wrote it"):
        commands_of(script, "here", "apply")


def test_steps_may_be_taken_out_of_a_script(tmp_path: Path) -> None:
    steps = (MendStep("echo 1 > /x", "echo 0 > /x"), MendStep("echo 1 > /y", "echo 0 > /y"))
    script = written(tmp_path, finding("os.a", *steps))
    script.write_text(script.read_text().replace("    step 'echo 1 > /x'\n", ""))
    assert commands_of(script, "here", "apply") == ["echo 1 > /y"]


def test_the_commands_are_listed_before_they_run(tmp_path: Path) -> None:
    script = written(tmp_path, finding("os.a", MendStep("echo 1 > /x", "echo 0 > /x")))
    assert commands_of(script, "here", "apply") == ["echo 1 > /x"]
    assert commands_of(script, "here", "undo") == ["echo 0 > /x"]


@pytest.mark.parametrize(
    ("text", "rule"),
    [("#!/bin/sh\nrm -rf x\n", "no script"), (fix_script("there", []), "written on there")],
)
def test_scripts_of_others_are_refused(tmp_path: Path, text: str, rule: str) -> None:
    script = tmp_path / "fix.sh"
    script.write_text(text)
    with pytest.raises(ConfigError, match=rule):
        commands_of(script, "here", "apply")
    with pytest.raises(ConfigError, match="No such file"):
        commands_of(tmp_path / "none.sh", "here", "apply")


def test_a_script_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    script = written(tmp_path)
    done = subprocess.run(
        ["sh", str(script), "repair"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "usage" in done.stderr


def test_what_a_script_becomes_after_it_was_shown_does_not_run(tmp_path: Path) -> None:
    shown, other = tmp_path / "shown", tmp_path / "other"
    script = written(tmp_path, finding("os.a", MendStep(f"touch {shown}", "true")))
    commands = commands_of(script, "here", "apply")
    script.write_text(script.read_text().replace(str(shown), str(other)))
    assert run_commands(commands) == 0
    assert shown.exists() and not other.exists()
