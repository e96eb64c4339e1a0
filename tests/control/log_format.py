"""What a log is made of, as text that changes whenever a stored struct does.

``python -m tests.control.log_format`` records it after FORMAT_VERSION was raised.
"""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec.inspect as look
from msgspec import NODEFAULT

from phalanx.cluster.protocol.commands import Command
from phalanx.cluster.protocol.events import EventBody
from phalanx.cluster.snapshot import FORMAT_VERSION, CoreState
from phalanx.control.server.security.auth import KeptToken
from phalanx.control.server.shell_memory import ShellMemory
from phalanx.control.server.store.schema import FORMAT_TABLES, TABLES

RECORDED = Path(__file__).parent / "recorded" / "log-format.json"


def described() -> dict[str, Any]:
    """Every struct and enum that a log holds, with its fields; and its tables."""
    found: dict[str, Any] = {}
    classes: list[type] = []
    for root in (EventBody, Command, CoreState, ShellMemory, KeptToken):
        _name(look.type_info(root), found, classes)
    tables = " ".join((TABLES + FORMAT_TABLES).split())
    return {"format": FORMAT_VERSION, "tables": tables, "types": dict(sorted(found.items()))}


def _put(found: dict[str, Any], name: str, body: dict[str, Any]) -> None:
    assert name not in found, f"two stored types are called {name}: they are told apart by name"
    found[name] = body


def _name(kind: look.Type, found: dict[str, Any], classes: list[type]) -> str:
    match kind:
        case look.StructType(cls=cls):
            if cls not in classes:
                classes.append(cls)
                _put(found, cls.__qualname__, _fields(kind, found, classes))
            return cls.__qualname__
        case look.EnumType(cls=cls):
            if cls not in classes:
                classes.append(cls)
                _put(found, cls.__qualname__, {each.name: each.value for each in cls})
            return cls.__qualname__
        case look.UnionType(types=types):
            return " | ".join(sorted(_name(each, found, classes) for each in types))
        case look.DictType(key_type=key, value_type=value):
            return f"dict[{_name(key, found, classes)}, {_name(value, found, classes)}]"
        case look.TupleType(item_types=items):
            return f"tuple[{', '.join(_name(each, found, classes) for each in items)}]"
        case look.LiteralType(values=values):
            return f"one of {sorted(map(str, values))}"
    item = getattr(kind, "item_type", None)
    name = type(kind).__name__.removesuffix("Type").lower()
    return f"{name}[{_name(item, found, classes)}]" if item is not None else name


def _fields(kind: look.StructType, found: dict[str, Any], classes: list[type]) -> dict[str, str]:
    """Names, types, and the defaults that are left out when a struct is stored."""
    config = kind.cls.__struct_config__
    fields = {}
    for field in kind.fields:
        text = _name(field.type, found, classes)
        if not field.required:
            text += " = ?"
            if config.omit_defaults and field.default is not NODEFAULT:
                default = field.default
                text = text[:-1] + repr(default.value if isinstance(default, Enum) else default)
        fields[field.encode_name] = text
    head = {"(tag)": str(kind.tag)} if kind.tag is not None else {}
    return head | ({"(array)": "yes"} if kind.array_like else {}) | fields


def record() -> None:
    """Writes the file that the test compares with."""
    RECORDED.write_text(json.dumps(described(), indent=1) + "\n")


if __name__ == "__main__":
    record()
