"""The log as a page: every event that the core is told, and every command that it gives."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any, get_args

from docs.generator.markdown import code, paragraphs, prose, table
from docs.generator.settings import field_comments
from phalanx.cluster.protocol import commands, events

HEAD = ("field", "type", "meaning")
ORDERS = (events.JobOrder, events.PipelineOrder, events.NodeOrder, events.SiteOrder)


def lines() -> list[str]:
    """Orders, facts and commands, each with its fields."""
    orders = [body for union in ORDERS for body in get_args(union)]
    facts = [body for body in get_args(events.EventBody) if body not in orders]
    return [
        *_section("Orders of people and programs", orders),
        *_section("Facts, and what detectors found", facts),
        *_section("Commands: what is decided", get_args(commands.CommandBody)),
    ]


def _section(title: str, bodies: Any) -> Iterator[str]:
    yield from (f"## {title}", "")
    for body in bodies:
        yield from (f"### `{body.__name__}`", "")
        yield from paragraphs(inspect.getdoc(body) or "")
        if rows := list(fields(body)):
            yield from (*table(HEAD, rows), "")


def fields(body: type) -> Iterator[tuple[str, str, str]]:
    """Name, type and meaning of what a struct has of its own."""
    meanings = field_comments(body.__module__)[body.__name__]
    for name, written in written_types(body.__module__)[body.__name__].items():
        yield code(name), code(written), prose(meanings.get(name, ""))


@cache
def written_types(module: str) -> dict[str, dict[str, str]]:
    """Fields and their types as the source has them, by class."""
    return {
        node.name: {
            field.target.id: ast.unparse(field.annotation)
            for field in node.body
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        }
        for node in ast.parse(inspect.getsource(sys.modules[module])).body
        if isinstance(node, ast.ClassDef)
    }
