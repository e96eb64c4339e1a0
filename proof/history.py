"""The store of figures: one JSON line a measurement, appended and never changed."""

from __future__ import annotations

import os
import statistics
import subprocess
from collections.abc import Iterable
from pathlib import Path

import msgspec

ROOT = Path(__file__).parent.parent
HISTORY = ROOT / "proof" / "history.jsonl"
COMMIT_VARIABLE = "PHALANX_COMMIT"  # where the tree was copied without its repository
COMPARED = 5  # measurements that make a figure's history


class Measurement(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One run of a claim's command."""

    claim: str
    date: str
    commit: str
    machine: str
    busy: float  # share of the cores that others used just before and just after, the greater
    trusted: bool  # the cores were quiet, or nothing in the claim needs them so
    seconds: float
    figures: dict[str, float]
    pace: float = 0.0  # seconds that a fixed piece of work took beside it; 0: not measured
    command: str = ""  # what measured it; "": stored before commands were

    def by_other_command(self, command: str) -> bool:
        """Whether the claim's command is another one by now."""
        return bool(self.command) and self.command != command


def read(path: Path = HISTORY) -> list[Measurement]:
    """All measurements, oldest first."""
    if not path.exists():
        return []
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            found.append(msgspec.json.decode(line, type=Measurement))
        except msgspec.MsgspecError as error:
            raise SystemExit(f"{path}:{number}: not a measurement: {error}") from error
    return found


def append(measurements: Iterable[Measurement], path: Path = HISTORY) -> None:
    """Add measurements at the end; those that are there already are left out."""
    there = set(path.read_bytes().splitlines()) if path.exists() else set()
    lines = [msgspec.json.encode(each) for each in measurements]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.writelines(line + b"\n" for line in lines if line not in there)


def newest(measurements: Iterable[Measurement]) -> dict[str, Measurement]:
    """The one to show for each claim: the newest trusted one, else the newest."""
    shown: dict[str, Measurement] = {}
    for each in measurements:
        if each.trusted or each.claim not in shown or not shown[each.claim].trusted:
            shown[each.claim] = each
    return shown


def reference(measurements: Iterable[Measurement], claim: str, machine: str) -> dict[str, float]:
    """What each figure of a claim usually was on such a machine: the median of the last few."""
    values: dict[str, list[float]] = {}
    for each in measurements:
        if each.claim == claim and each.machine == machine and each.trusted:
            for name, value in each.figures.items():
                values.setdefault(name, []).append(value)
    return {name: statistics.median(found[-COMPARED:]) for name, found in values.items()}


def usual_pace(measurements: Iterable[Measurement], machine: str) -> float:
    """How long the fixed piece of work usually took on such a machine; 0 where nobody knows."""
    paces = [each.pace for each in measurements if each.machine == machine and each.pace]
    return statistics.median(paces) if paces else 0.0


def this_commit() -> str:
    """The commit that is measured, with "+" where the working tree differs from it."""
    if given := os.environ.get(COMMIT_VARIABLE):
        return given
    commit = _git("rev-parse", "--short=10", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", "phalanx", "benchmarks")
    return (commit or "unknown") + ("+" if changed else "")


def commits_since(commit: str) -> int | None:
    """Commits from that one to HEAD; nothing where HEAD does not come from it.

    Git counts those since the common ancestor then, which are fewer: of commits that were rewritten
    a clone may still have the old ones.
    """
    measured = commit.rstrip("+")
    if _git("merge-base", measured, "HEAD") != _git("rev-parse", f"{measured}^{{commit}}"):
        return None
    count = _git("rev-list", "--count", f"{measured}..HEAD")
    return int(count) if count.isdigit() else None


def _git(*words: str) -> str:
    done = subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else ""
