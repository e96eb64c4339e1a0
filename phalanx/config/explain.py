"""What each key means: type, default, allowed values and one sentence, from the schema itself."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from functools import cache

from msgspec import Struct

from phalanx.config.errors import ConfigError, did_you_mean, near
from phalanx.config.schema import Job
from phalanx.config.section import Section
from phalanx.config.tree import allowed, below_field, default_of, fields, paths, section_in


class KeyDoc(Struct, frozen=True):
    """One key of the configuration, explained."""

    key: str
    allowed: str
    default: str  # as TOML; "" for a table or where a value must be given
    meaning: str
    section: bool


def explain(key: str = "", root: type[Section] = Job) -> list[KeyDoc]:
    """The key and everything below it; every key when none is given."""
    docs = [doc for doc in catalogue(root) if _covers(key, doc.key)]
    if not docs:
        raise ConfigError(key, "", "is no known key", _nearest(key, root))
    return docs


@cache
def catalogue(root: type[Section] = Job) -> tuple[KeyDoc, ...]:
    """Every key of a tree, in the schema's order."""
    return tuple(_docs(root, ""))


def _covers(asked: str, key: str) -> bool:
    return not asked or key == asked or key.startswith((asked + ".", asked + "["))


def _nearest(key: str, root: type[Section]) -> str:
    match = near(key, paths(root))
    if not match:
        by_last_word = {path.rsplit(".", 1)[-1]: path for path in reversed(paths(root))}
        match = by_last_word.get(near(key.rsplit(".", 1)[-1], list(by_last_word)), "")
    return f'did you mean "{match}"?' if match else did_you_mean(key, list(fields(root)))


def _docs(section: type[Section], prefix: str) -> Iterator[KeyDoc]:
    meanings = _meanings(section.__module__)[section.__name__]
    for name, hint in fields(section).items():
        key = prefix + name
        inner = section_in(hint)
        meaning = meanings.get(name) or (inspect.getdoc(inner) or "" if inner else "")
        yield KeyDoc(key, allowed(hint), default_of(section, name), meaning, bool(inner))
        entry, below = below_field(hint, key)
        if entry is not None:
            yield from _docs(entry, below)


@cache
def _meanings(module: str) -> dict[str, dict[str, str]]:
    """The sentence below each field, by class and field: Python drops it, the source keeps it."""
    meanings: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(sys.modules[module])).body:
        if isinstance(node, ast.ClassDef):
            meanings[node.name] = dict(_class_meanings(node))
    return meanings


def _class_meanings(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, below in zip(node.body, node.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        ):
            yield field.target.id, below.value.value
