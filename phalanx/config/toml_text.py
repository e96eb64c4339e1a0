"""TOML of other people: bounded before it is parsed.

``tomllib`` recurses into nested values and looks at every prefix of a dotted key, so a short text
can exhaust its stack, or hold a processor for minutes. Depth and keys are counted beforehand, in
one pass over the text; what comes out can be walked by anything that recurses.
"""

from __future__ import annotations

import re
import tomllib
from typing import Any

MOST_CHARACTERS = 1 << 20
MOST_DEPTH = 32  # far above any tree of ours, far below what recursion bears
MOST_NAMES = 32  # of one dotted key
TOO_DEEP = f"it is nested too deeply: at most {MOST_DEPTH} levels are read"
TOO_LONG = f"it is nested too deeply: a key has more than {MOST_NAMES} names"
LARGEST = 1 << 63  # integers of TOML have 64 bits

# Strings and comments are passed over whole; everything else that matters is one character.
_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"""|\'\'\'.*?\'\'\'|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'|#[^\n]*|[\[\]{}.,=\n]',
    re.DOTALL,
)


def parse_toml(text: str, most_characters: int = MOST_CHARACTERS) -> dict[str, Any]:
    """The table that a text describes; ``tomllib.TOMLDecodeError`` where it is none of ours."""
    if len(text) > most_characters:
        raise tomllib.TOMLDecodeError(f"it has more than {most_characters:,} characters")
    _check_shape(text)
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except (ValueError, RecursionError, OverflowError) as error:  # e.g. numbers of many digits
        raise tomllib.TOMLDecodeError(str(error)) from None
    _check_values(table)
    return table


def _check_shape(text: str) -> None:
    depth = names = 0
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token == ".":
            names += 1
            if names >= MOST_NAMES:
                raise tomllib.TOMLDecodeError(TOO_LONG)
        elif token in "[{":
            depth += 1
            names = 0
            if depth > MOST_DEPTH:
                raise tomllib.TOMLDecodeError(TOO_DEEP)
        elif token in "]}":
            depth -= 1
            names = 0
        elif token in ",=\n":
            names = 0


def _check_values(table: dict[str, Any]) -> None:
    """Integers that no store can hold, and tables that headers nested too deeply."""
    level: list[Any] = [table]
    for _ in range(MOST_DEPTH):
        below: list[Any] = []
        for value in level:
            for each in value.values() if isinstance(value, dict) else value:
                if isinstance(each, dict | list):
                    below.append(each)
                elif isinstance(each, int) and not -LARGEST <= each < LARGEST:
                    raise tomllib.TOMLDecodeError("an integer does not fit 64 bits")
        if not below:
            return
        level = below
    raise tomllib.TOMLDecodeError(TOO_DEEP)
