"""A machine for one check: a recorded tree, with what a case says on top of it."""

from __future__ import annotations

import fnmatch
from pathlib import Path

from msgspec import Struct

from phalanx.doctor.checks.check import Profile, decide
from phalanx.doctor.checks.evidence import NodeEvidence, ProcessFacts, recorded_process
from phalanx.doctor.checks.registry import SETTINGS
from phalanx.doctor.finding import Finding
from phalanx.hardware.probe import RecordedReader
from phalanx.hardware.probe.reader import NotThereError, Reader, ReadError

TESTS = Path(__file__).parents[2]
CPU_VIRTUAL = TESTS / "doctor/recorded/cpu-virtual"  # captured
HARDWARE = TESTS / "hardware/probe/recorded"
H200_VIRTUAL = HARDWARE / "h200-virtual"  # captured
NOTHING = HARDWARE / "nothing"  # is not there

# Paths with their text, "/path ->" with what a link leads to, "$ command" with what it prints
# ("!why": it fails). An empty path's text stands for a name in a folder.
Tree = dict[str, str]


class PlayedReader:
    """What a case says, and below it what was recorded."""

    def __init__(self, tree: Tree, below: Path | None) -> None:
        self._tree = tree
        self._below: Reader | None = RecordedReader(below) if below else None

    def run(self, *command: str) -> str:
        text = self._tree.get(f"$ {' '.join(command)}")
        if text is not None and text.startswith("!"):
            raise ReadError(" ".join(command), text[1:])
        if text is not None:
            return text
        if self._below is None:
            raise NotThereError(command[0])
        return self._below.run(*command)

    def text(self, path: str) -> str:
        if path in self._tree:
            return self._tree[path].strip()
        if self._below is None:
            raise NotThereError(path)
        return self._below.text(path)

    def names(self, folder: str, pattern: str = "*") -> list[str]:
        inside = [path[len(folder) + 1 :] for path in self._tree if path.startswith(f"{folder}/")]
        found = {name.split("/")[0].removesuffix(" ->") for name in inside}
        names = set(fnmatch.filter(found, pattern))
        return sorted(names | set(self._below.names(folder, pattern) if self._below else ()))

    def link(self, path: str) -> str:
        if f"{path} ->" in self._tree:
            return self._tree[f"{path} ->"]
        if self._below is None:
            raise NotThereError(path)
        return self._below.link(path)


class Case(Struct, frozen=True, kw_only=True):
    """Evidence on which a check is good, on which it is bad, and what little is there at worst."""

    check: str
    good: Tree
    bad: Tree
    missing: Tree = {}
    good_process: ProcessFacts = ProcessFacts()
    bad_process: ProcessFacts | None = None  # None: the same
    mends: str = ""  # in what is suggested
    undoes: str = ""  # one of the commands that take it back; "": a person's work
    below: Path | None = None


def played(
    check: str,
    tree: Tree,
    process: ProcessFacts | None = None,
    *,
    below: Path | None = None,
    profiles: tuple[Profile, ...] = ("metal",),
) -> Finding:
    """A check's finding on a machine that is put together."""
    if process is None:
        process = recorded_process(below) if below else ProcessFacts()
    with NodeEvidence(PlayedReader(tree, below), process) as evidence:
        return decide(SETTINGS[check], evidence, profiles)


def prove(case: Case) -> None:
    """Good passes; bad warns or fails with what to do; missing evidence is unknown."""
    good = played(case.check, case.good, case.good_process, below=case.below)
    assert good.verdict == "pass", good
    process = case.good_process if case.bad_process is None else case.bad_process
    bad = played(case.check, case.bad, process, below=case.below)
    severity = SETTINGS[case.check].severity
    assert bad.verdict == ("fail" if severity == "critical" else "warn"), bad
    assert bad.severity == severity and bad.why and bad.expected and bad.measured
    assert case.mends in bad.suggestion and bad.suggestion, bad.suggestion
    undone = [step.undo for step in bad.steps]
    assert (case.undoes in undone) if case.undoes else not undone, undone
    missing = played(case.check, case.missing)
    assert missing.verdict == "unknown", missing
    assert missing.measured["missing"]
