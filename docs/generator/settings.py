"""Files of settings as pages: every key with what it accepts, its default and its meaning."""

from __future__ import annotations

import ast
import inspect
import io
import sys
import tokenize
import typing
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, get_args, get_origin

import msgspec

from docs.generator.markdown import code, paragraphs, prose, table
from phalanx.config.errors import written
from phalanx.config.explain import KeyDoc, catalogue
from phalanx.config.tree import allowed

HEAD = ("key", "accepts", "default", "meaning")
UNITS = (("days", 86_400 * 10**9), ("h", 3_600 * 10**9), ("min", 60 * 10**9), ("s", 10**9))


def job_file() -> list[KeyDoc]:
    """Every key of a job file."""
    return list(catalogue())


def struct_keys(root: type[msgspec.Struct]) -> list[KeyDoc]:
    """Every key of a file that is read into a struct, explained by the comments in its source."""
    return list(_keys(root, ""))


def sections(keys: Iterable[KeyDoc]) -> list[str]:
    """A heading and a table for each table of the file; keys outside any table come first."""
    docs = list(keys)
    headings = {doc.key: doc.meaning for doc in docs if doc.section}
    by_section: dict[str, list[KeyDoc]] = {"": []}
    for doc in docs:
        if not doc.section:
            by_section.setdefault(doc.key.rpartition(".")[0], []).append(doc)
    lines: list[str] = []
    for section, members in by_section.items():
        if not members:
            continue
        if section:
            lines += [f"## `{_header(section)}`", ""]
            lines += paragraphs(headings.get(section, ""))
        rows = [
            (code(doc.key[len(section) + 1 :] if section else doc.key), *_cells(doc))
            for doc in members
        ]
        lines += [*table(HEAD, rows), ""]
    return lines


def _header(section: str) -> str:
    """The header as a file has it: an array of tables has two brackets."""
    return f"[[{section[:-2]}]]" if section.endswith("[]") else f"[{section}]"


def _cells(doc: KeyDoc) -> tuple[str, str, str]:
    return prose(doc.allowed), readable(doc.key, doc.default), prose(doc.meaning)


def readable(key: str, default: str) -> str:
    """A default as it is written and, where it counts nanoseconds or millionths, what that is."""
    if not default.lstrip("-").isdigit() or default == "0":
        return code(default)
    number = int(default)
    if key.endswith("_ns"):
        return f"{code(default)} ({duration(number)})"
    if key.endswith("_ppm"):
        return f"{code(default)} ({number / 10_000:g} %)"
    return code(default)


def duration(nanoseconds: int) -> str:
    """A time in the largest unit that divides it."""
    for unit, size in UNITS:
        if nanoseconds % size == 0 and (unit != "days" or nanoseconds > size):
            return f"{nanoseconds // size} {unit}"
    return f"{nanoseconds / 10**6:g} ms"


def _keys(struct: type[msgspec.Struct], prefix: str) -> Iterator[KeyDoc]:
    hints = typing.get_type_hints(struct, include_extras=True)
    meanings = field_comments(struct.__module__)[struct.__name__]
    for field in msgspec.structs.fields(struct):
        key, hint = prefix + field.encode_name, hints[field.name]
        inner, below = _struct_below(hint, key)
        meaning = meanings.get(field.name, "")
        accepts = "a table of tables" if get_origin(hint) is dict and inner else allowed(hint)
        default = "" if inner else _default(field)
        if inner and not meaning:
            meaning = inspect.getdoc(inner) or ""
        whole = inner is not None and get_origin(hint) is not dict
        yield KeyDoc(key, accepts, default, meaning, whole)
        if inner:
            yield from _keys(inner, below)


def _struct_below(hint: Any, key: str) -> tuple[type[msgspec.Struct] | None, str]:
    inner = get_args(hint)[1] if get_origin(hint) is dict else hint
    if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
        return inner, f"{key}.NAME." if inner is not hint else f"{key}."
    return None, ""


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return ""
    factory = field.default_factory
    value: Any = field.default if factory is msgspec.NODEFAULT else factory()
    return written(value)


@cache
def field_comments(module: str) -> dict[str, dict[str, str]]:
    """The comment beside or above each field, by class and field."""
    source = inspect.getsource(sys.modules[module])
    comments = {
        token.start[0]: (token.string.lstrip("# "), not token.line[: token.start[1]].strip())
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    return {
        node.name: dict(_fields(node, comments))
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef)
    }


def _fields(node: ast.ClassDef, comments: dict[int, tuple[str, bool]]) -> Iterator[tuple[str, str]]:
    for field in node.body:
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        above: list[str] = []
        line = field.lineno - 1
        while line in comments and comments[line][1]:
            above.insert(0, comments[line][0])
            line -= 1
        beside = [
            comments[number][0]
            for number in range(field.lineno, (field.end_lineno or field.lineno) + 1)
            if number in comments
        ]
        yield field.target.id, " ".join(above + beside)
