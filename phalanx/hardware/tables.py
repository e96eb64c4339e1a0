"""Reads the data files of the catalogue, and finds entries by name."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any, TypeVar

from phalanx.config import ConfigError

T = TypeVar("T")


@cache
def table(file: str) -> dict[str, Any]:
    """The parsed TOML of a data file in this package."""
    text = resources.files("phalanx.hardware").joinpath(file).read_text(encoding="utf-8")
    return tomllib.loads(text)


def find(entries: Mapping[str, T], name: str, what: str) -> T:
    """The entry of this name; an unknown one is refused with the nearest names."""
    folded = " ".join(name.split()).casefold()
    if folded in entries:
        return entries[folded]
    raise ConfigError(what, f'"{name}"', f"no such {what}", nearest(folded, list(entries)))


def nearest(name: str, names: list[str]) -> str:
    """``did you mean …?`` with up to three near names, or all names."""
    matches = difflib.get_close_matches(name, names, n=3, cutoff=0.55)
    if matches:
        return "did you mean " + " or ".join(f'"{match}"' for match in matches) + "?"
    return "known: " + ", ".join(names)
