"""The tree of settings as TOML that loads back into the same tree."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.config.errors import written
from phalanx.config.schema import Section


def to_toml(section: Section, name: str = "") -> str:
    """A section and all below it; ``name`` is the table it stands in, "" for a job."""
    return "\n".join(_lines(section, name)).strip() + "\n"


def _lines(section: Section, name: str) -> Iterator[str]:
    values = {field: getattr(section, field) for field in section.__struct_fields__}
    tables = {field: value for field, value in values.items() if isinstance(value, Section)}
    if name:
        yield f"\n[{name}]"
    for field, value in values.items():
        if field not in tables:
            yield f"{field} = {written(value)}"
    for field, table in tables.items():
        yield from _lines(table, f"{name}.{field}" if name else field)
