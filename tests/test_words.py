"""The words of the code: the field's, one name for one thing."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]

# What is said instead, by the word that must not come back as part of an identifier.
BANNED = {
    "ears": "worker_events",
    "crew": "node_jobs",
    "mourn": "report_unexplained_exit",
    "bury": "mark_node_lost",
    "reign": "lead_until_deposed",
    "mother": "parent",
    "guest": "anonymous connection, or borrower of quota",
    "guests": "borrowers",
    "harm": "fault",
    "harms": "faults",
    "struck": "applied",
    "autopsy": "hang_diagnosis",
    "chronicle": "run_history",
    "arena": "cluster",
    "shelf": "snapshots",
    "examiner": "checker",
}
ALLOWED = {
    "Shelve": "the name of a stored message",
}
ROOM = "room"  # a package: no identifier has it but keys of the policy and codes of reasons
ROOM_KEYS = ("room_retry_ns", "room_tries")

# Classes whose names stand in two modules: names on a wire or in a file, or two faces of one thing.
TWICE = {
    *("Ask", "Data", "Drain", "Flush", "Inventory", "Ready"),
    *("Train", "Welcome"),
    "Dtype",  # an option of two commands
    "Job",  # as it is configured, and as the core knows it
    "LatentAttention",  # its settings, and the module
    "Memory",  # settings, and what a server stores of its answers
}


@cache
def modules() -> dict[Path, ast.Module]:
    files = sorted((ROOT / "phalanx").rglob("*.py"))
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in files}


def words(identifier: str) -> list[str]:
    """``parent_zygote`` and ``ParentZygote`` are two words each."""
    spaced = "".join(f" {letter}" if letter.isupper() else letter for letter in identifier)
    return spaced.replace("_", " ").lower().split()


def identifiers(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                yield node.lineno, name
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                yield node.lineno, name
            case ast.AsyncFunctionDef(name=name) | ast.arg(arg=name):
                yield node.lineno, name


def test_identifiers_say_what_a_thing_is() -> None:
    bad = [
        f"{path.relative_to(ROOT)}:{line}: {name} (say {BANNED[word]})"
        for path, tree in modules().items()
        for line, name in identifiers(tree)
        for word in words(name)
        if word in BANNED and name not in ALLOWED
    ]
    assert not bad, "\n".join(bad)


def test_a_room_is_a_package_and_no_identifier_has_it() -> None:
    bad = [
        f"{path.relative_to(ROOT)}:{line}: {name} (say capacity, space or buffer)"
        for path, tree in modules().items()
        for line, name in identifiers(tree)
        if {ROOM, ROOM + "s"} & set(words(name)) and name not in ROOM_KEYS
    ]
    assert not bad, "\n".join(bad)


def test_a_class_name_stands_in_one_module() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for path, tree in modules().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(path.relative_to(ROOT)))
    several = {name: where for name, where in homes.items() if len(where) > 1}
    assert several.keys() == TWICE, {
        name: several.get(name, "stands in one module by now: take it off the list")
        for name in several.keys() ^ TWICE
    }
