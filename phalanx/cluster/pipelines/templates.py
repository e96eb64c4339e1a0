"""Placeholders in a step's texts: ``{seed}``, ``{inputs.text}``, ``{outputs.corpus}``."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Mapping, Sequence
from typing import Any

_PLACE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}")
LATER = ("inputs.", "outputs.")  # known when the step starts
STDLIB = "stdlib"


def builtin() -> dict[str, str]:
    """Placeholders that every step has."""
    return {STDLIB: sysconfig.get_paths()["stdlib"]}


def placeholders(text: str) -> list[str]:
    """Placeholders in a text."""
    return [found[1] for found in _PLACE.finditer(text) if found[1] is not None]


def fill(text: str, values: Mapping[str, object]) -> str:
    """Fill in the given names; placeholders of inputs and outputs stay."""

    def one(match: re.Match[str]) -> str:
        name = match[1]
        if name is None or name.startswith(LATER):
            return match[0]
        value = values[name]
        return str(value).lower() if isinstance(value, bool) else str(value)

    return _PLACE.sub(one, text)


def fill_builtin(value: Any) -> Any:
    """Fill the built-in placeholders in a table, before it is sent to another machine."""
    if isinstance(value, dict):
        return {name: fill_builtin(each) for name, each in value.items()}
    if isinstance(value, list):
        return [fill_builtin(each) for each in value]
    builtin_values = builtin()
    if not isinstance(value, str):
        return value
    return _PLACE.sub(lambda found: builtin_values.get(found[1] or "", found[0]), value)


def fill_paths(arguments: Sequence[str], paths: Mapping[str, Sequence[str]]) -> list[str]:
    """Fill in ``inputs.NAME`` and ``outputs.NAME``.

    A word that is nothing but a placeholder becomes as many words as there are paths.
    """
    filled: list[str] = []
    for word in arguments:
        names = placeholders(word)
        if len(names) == 1 and word == f"{{{names[0]}}}":
            filled += paths[names[0]]
        else:
            filled.append(_PLACE.sub(lambda found: _one(found, paths), word))
    return filled


def _one(match: re.Match[str], paths: Mapping[str, Sequence[str]]) -> str:
    if match[1] is None:
        return match[0][0]
    (path,) = paths[match[1]]
    return path
