"""The script that mends what checks found: to be read, run only when asked, and undone."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable, Iterable
from itertools import zip_longest
from pathlib import Path
from shlex import quote
from typing import Literal

from phalanx.config import ConfigError
from phalanx.doctor.finding import Finding, plain

MARK = "# Written by `phalanx doctor node --fix-script`"
NODE, BOOT = "# Node: ", "# Boot: "
HEAD = """\
#!/bin/sh
{mark}: read it first.
{node}{name}
{boot}#   sh FILE         changes the settings, until the next boot (ECC, MIG and stripes: for good)
#   sh FILE undo    puts back what was there when this was written
set -u
failed=0
step() {{
    printf '+ %s\\n' "$1"
    sh -c "$1" || {{ failed=1; printf 'this failed\\n' >&2; }}
}}
[ "$(id -u)" = 0 ] || printf 'not root: expect most of this to fail\\n' >&2
"""
TAIL = """\
case "${1:-apply}" in
    apply) apply ;;
    undo) undo ;;
    *) printf 'usage: sh FILE [apply|undo]\\n' >&2; exit 2 ;;
esac
exit "$failed"
"""


def fix_script(node: str, findings: Iterable[Finding], *, boot: str = "") -> str:
    """A shell script for every finding that commands can mend; the others are told in comments.

    ``boot``: the kernel's number of the boot that it was written in; "": it is not known.
    """
    broken = [finding for finding in findings if finding.verdict in ("warn", "fail")]
    mended = [finding for finding in broken if finding.steps]
    of_boot = f"{BOOT}{_one_line(boot)}\n" if boot else ""
    lines = [HEAD.format(mark=MARK, node=NODE, name=_one_line(node), boot=of_boot)]
    lines += ["apply() {", *(line for each in mended for line in _applied(each)), "    :", "}", ""]
    lines += ["undo() {"]
    for finding in reversed(mended):
        lines += [f"    # {finding.check}"]
        lines += [f"    step {quote(step.undo)}" for step in reversed(finding.steps)]
    lines += ["    :", "}", ""]
    by_hand = [finding for finding in broken if not finding.steps and finding.suggestion]
    if by_hand:
        lines += ["# By hand:", *(_comment(f"{f.check}: {f.suggestion}") for f in by_hand), ""]
    return "\n".join([*lines, TAIL])


def _applied(finding: Finding) -> list[str]:
    facts = ", ".join(f"{name} {plain(value)}" for name, value in finding.measured.items())
    return [
        f"    {_comment(f'{finding.check} ({finding.severity}): {facts}')}",
        f"    {_comment(f'expected {finding.expected}. {finding.why}')}",
        *([f"    {_comment(f'mind: {advice}')}"] if (advice := _advice(finding)) else []),
        *(f"    step {quote(step.do)}" for step in finding.steps),
    ]


def _advice(finding: Finding) -> str:
    """What is suggested beside the commands."""
    commands = "; ".join(step.do for step in finding.steps)
    return finding.suggestion.removeprefix(commands).removeprefix("; ")


def _comment(text: str) -> str:
    return f"# {_one_line(text)}"


def _one_line(text: str) -> str:
    """What was read of a machine must not end a comment, nor hide a line from who reads it."""
    words = " ".join(text.split())
    return "".join(letter if letter.isprintable() else "?" for letter in words)


def commands_of(script: Path, node: str, action: Literal["apply", "undo"]) -> list[str]:
    """The commands that a script would run; ConfigError where it is none of this node's."""
    try:
        text = script.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError("script", str(script), why, "name a script of --fix-script") from None
    made = re.search(rf"(?m)^{re.escape(NODE)}(.*)$", text)
    if MARK not in text or made is None:
        rule = "no script of `phalanx doctor node --fix-script`"
        raise ConfigError("script", str(script), rule, "make one, and read it")
    if made[1] != _one_line(node):
        rule = f"was written on {made[1]}: it would put back that node's settings"
        raise ConfigError("script", str(script), rule, "write one here")
    steps: dict[str, list[str]] = {"apply": [], "undo": []}
    where = ""  # the function that a row stands in
    frame = []
    for row in text.splitlines():
        step = _step(row)
        if step and where:
            steps[where].append(step)
        elif not _is_remark(row):
            frame.append(row)
            where = {"apply() {": "apply", "undo() {": "undo"}.get(row, "")
    _refuse_others(script, frame)
    return steps[action]


def booted_since(script: Path, boot: str) -> bool:
    """Whether a script that was read is of an earlier boot than this one."""
    made = re.search(rf"(?m)^{re.escape(BOOT)}(.*)$", script.read_text(encoding="utf-8"))
    return bool(boot) and made is not None and made[1] != _one_line(boot)


def _refuse_others(script: Path, lines: list[str]) -> None:
    """Somebody who reads what is shown must have read all that the script would do."""
    frame = [line for line in fix_script("", ()).splitlines() if not _is_remark(line)]
    if lines != frame:
        pairs = zip_longest(lines, frame, fillvalue="")
        first = next(read or "its end" for read, wanted in pairs if read != wanted)
        rule = f"is not as doctor wrote it: {first.strip()[:80]!r}"
        raise ConfigError("script", str(script), rule, "read it; `sh` runs it if you trust it")


def _is_remark(line: str) -> bool:
    return not line.strip() or line.lstrip().startswith("#")


def _step(row: str) -> str:
    """The command of a step; "" where it is none, or a terminal would not show all of it."""
    try:
        step = shlex.split(row)
    except ValueError:
        return ""
    whole = len(step) == 2 and row == f"    step {quote(step[1])}"
    return step[1] if whole and step[1].isprintable() else ""


def run_commands(commands: Iterable[str], say: Callable[[str], None] = print) -> int:
    """Run the commands that were shown, not what the script has become since; the exit code.

    One that fails does not keep the others from running, as in the script.
    """
    failed = False
    for command in commands:
        say(f"+ {command}")
        if subprocess.run(["sh", "-c", command], check=False).returncode:
            failed = True
            say("this failed")
    return int(failed)
