"""The tree of settings as TOML that loads back into the same tree."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from msgspec import structs

from phalanx.config.errors import written
from phalanx.config.section import Section


def to_toml(section: Section, name: str = "") -> str:
    """A section and all below it; ``name`` is the table it stands in, "" for a job."""
    return "\n".join(_lines(section, name)).strip() + "\n"


def _lines(section: Section, name: str) -> Iterator[str]:
    values = {field: getattr(section, field) for field in section.__struct_fields__}
    tables = {field: value for field, value in values.items() if _is_tables(value)}
    if name:
        yield f"\n[{name}]"
    yield from _plain(values, tables)
    for field, table in tables.items():
        below = f"{name}.{field}" if name else field
        if isinstance(table, Section):
            yield from _lines(table, below)
        elif isinstance(table, dict):
            for key, entry in table.items():
                yield from _lines(entry, f"{below}.{key}")
        else:
            for entry in table:
                yield f"\n[[{below}]]"
                yield from _plain({f: getattr(entry, f) for f in entry.__struct_fields__}, {})


def _plain(values: dict[str, Any], tables: dict[str, Any]) -> Iterator[str]:
    for field, value in values.items():
        if isinstance(value, Section) and field not in tables:  # of an entry of an array
            value = structs.asdict(value)
        if isinstance(value, dict) and field not in tables:
            inside = ", ".join(f"{_key(key)} = {written(entry)}" for key, entry in value.items())
            yield f"{field} = {{ {inside} }}" if inside else f"{field} = {{}}"
        elif field not in tables:
            yield f"{field} = {written(value)}"


def _key(name: str) -> str:
    """A key as TOML wants it: in quotes where it is not a plain word."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else written(name)


def _is_tables(value: object) -> bool:
    """Whether a value is a section, or a filled table or array of sections."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple):
        return bool(value) and all(isinstance(entry, Section) for entry in value)
    return isinstance(value, Section)
