"""Results of simulations for the page: files in a folder, as ``phalanx simulate --json`` writes."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

MOST_GPUS = 4096
MOST_DAYS = 3.0
MOST_BYTES = 16 << 20  # of a file that is read


class ListedResult(Struct, frozen=True, kw_only=True):
    """A result in a list. ``problem``: the file cannot be read as one."""

    name: str
    written_ns: int
    problem: str = ""
    scenario: str = ""
    seeds: int = 0
    gpus: int = 0
    days: float = 0.0
    goodput: float = 0.0
    ettr: float = 0.0
    interruptions: float = 0.0
    violations: int = 0


@cache
def names() -> dict[str, str]:
    """The scenarios that come with Phalanx, and what each is about."""
    from phalanx.simulate.scenario.load import load_scenario, scenario_names

    return {name: load_scenario(name).about for name in scenario_names()}


def lines(folder: Path, most: int) -> list[ListedResult]:
    """The newest results first."""
    found = [path for path in folder.glob("*.json") if path.is_file()] if folder.is_dir() else []
    found.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
    return [_line(path) for path in found[:most]]


def _line(path: Path) -> ListedResult:
    written = path.stat().st_mtime_ns
    report = read(path.parent, path.stem)
    try:
        assert report is not None
        summary, first = report["summary"], report["seeds"][0]
        mean = summary["mean"]
        return ListedResult(
            name=path.stem,
            written_ns=written,
            scenario=str(summary["scenario"]),
            seeds=int(summary["seeds"]),
            gpus=int(first["gpus"]),
            days=float(first["days"]),
            goodput=float(mean["goodput"]),
            ettr=float(mean["ettr"]),
            interruptions=float(mean["interruptions"]),
            violations=int(summary["violations"]),
        )
    except (AssertionError, KeyError, IndexError, TypeError, ValueError):
        problem = "no result of `phalanx simulate --json`"
        return ListedResult(name=path.stem, written_ns=written, problem=problem)


def count(folder: Path) -> int:
    """Results that there are."""
    return sum(1 for _ in folder.glob("*.json"))


def read(folder: Path, name: str) -> dict[str, Any] | None:
    """One result; None where there is none that can be read."""
    path = folder / f"{name}.json"
    try:
        if path.stat().st_size > MOST_BYTES:
            return None
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError):
        return None


def write(folder: Path, name: str, report: dict[str, Any]) -> None:
    """Keep a result, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{name}.new"
    temporary.touch(mode=0o600)
    temporary.write_bytes(msgspec.json.encode(report))
    temporary.rename(folder / f"{name}.json")


def run(scenario: str, gpus: int, days: float, seed: int) -> dict[str, Any]:
    """Play one seed; what cannot be played says why under ``problem``."""
    from phalanx.config import ConfigError
    from phalanx.simulate.runner import run_seeds
    from phalanx.simulate.scenario.load import load_scenario

    try:
        chosen = load_scenario(scenario, [f"fleet.gpus={gpus}", f"days={days}"])
        report = run_seeds(chosen, range(seed, seed + 1), 1, lambda _: None)
    except ConfigError as error:
        return {"problem": str(error)}
    found: dict[str, Any] = msgspec.to_builtins(report)
    return found
