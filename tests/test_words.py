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
# Names that carry nothing: more than so many lines they live in few places, and in ever fewer.
VAGUE = frozenset(
    ["found", "told", "known", "held", "words", "here", "place", "part", "line", "kind"]
)
VAGUE_LINES = 3
VAGUE_PLACES = 326  # lower it after renaming; it never rises
ROOM = "room"  # a package: no identifier has it but keys of the policy and codes of reasons
ROOM_KEYS = ("room_retry_ns", "room_tries")


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
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(str(path.relative_to(ROOT)))
    several = {name: where for name, where in homes.items() if len(where) > 1}
    assert several == {}


def bindings(function: ast.AST) -> Iterator[tuple[str, int, bool]]:
    """Names in a function, the line of each, and whether it is bound there."""
    for node in ast.walk(function):
        if isinstance(node, ast.Name):
            yield node.id, node.lineno, isinstance(node.ctx, ast.Store)
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno, True


def vague_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Variables and parameters that carry nothing and live for more than a few lines."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        lines: dict[str, list[int]] = defaultdict(list)
        bound = set()
        for name, line, binds in bindings(function):
            if name in VAGUE:
                lines[name].append(line)
                bound |= {name} if binds else set()
        for name in sorted(bound):
            first, last = min(lines[name]), max(lines[name])
            if last - first >= VAGUE_LINES:
                yield first, name


def test_names_that_carry_nothing_become_fewer() -> None:
    seen: dict[str, int] = defaultdict(int)
    for path, tree in modules().items():
        seen[path.relative_to(ROOT).parts[1]] += len(set(vague_names(tree)))
    assert sum(seen.values()) <= VAGUE_PLACES, dict(seen)


def test_a_name_that_carries_nothing_is_seen_where_it_lives_long() -> None:
    body = "def f(found):\n    a = 1\n    b = 2\n    return found + a + b\n"
    assert list(vague_names(ast.parse(body))) == [(1, "found")]
    assert list(vague_names(ast.parse(body.replace("    b = 2\n", "").replace(" + b", "")))) == []
    assert list(vague_names(ast.parse("def f(job):\n\n\n\n    return job.found\n"))) == []
