"""Settings of a site from a TOML file."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TypeVar

import msgspec

from phalanx.config import ConfigError
from phalanx.config.toml_text import parse_toml

T = TypeVar("T")


def read_struct(path: Path, struct: type[T], option: str) -> T:
    """A file as a struct; ConfigError names what is wrong with it."""
    try:
        table = parse_toml(path.read_text())
    except OSError as error:
        raise ConfigError(
            option, str(path), error.strerror or "unreadable", "name a TOML file"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(option, str(path), f"not TOML: {error}", "correct it") from None
    try:
        return msgspec.convert(table, struct)
    except msgspec.ValidationError as error:
        rule, _, where = str(error).partition(" - at `$.")
        name = where.rstrip("`") or option.lstrip("-")
        raise ConfigError(name, "", rule, f"correct {path}") from None
