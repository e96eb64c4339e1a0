"""The nearest value that a field would have accepted instead of the one it was given."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec

from phalanx.config.errors import near, written

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def literal_values(hint: Any) -> tuple[Any, ...]:
    """The values a field is limited to, or nothing."""
    return get_args(hint) if get_origin(hint) is Literal else ()


def fix_for(value: Any, hint: Any, default: str) -> str:
    """What to write instead of ``value``; ``default`` is the field's own, "" where it has none."""
    base = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    if choices := literal_values(base):
        choice = _choice(value, choices)
    elif base is bool:
        word = written(value).strip('"').lower()
        choice = "write true" if word in _TRUE else "write false" if word in _FALSE else ""
    elif base in (int, float):
        choice = _nearest_number(value, base, hint)
    elif base is str and not isinstance(value, dict | list):
        choice = f"write {written(str(value))}"
    elif get_origin(base) is dict:
        choice = "e.g. { name = 1.0 }"
    elif any(get_origin(option) is tuple for option in (base, *get_args(base))):
        choice = "e.g. [0, 3]"
    else:
        choice = ""
    return choice or (f"the default is {default}" if default else "give a value of that kind")


def _choice(value: Any, choices: tuple[Any, ...]) -> str:
    if isinstance(value, str) and (match := near(value, [str(choice) for choice in choices])):
        return f'did you mean "{match}"?'
    numbers = [choice for choice in choices if isinstance(choice, int)]
    if numbers and (number := _number(value)) is not None:
        return f"nearest: {min(numbers, key=lambda choice: abs(choice - number))}"
    return ""


def _nearest_number(value: Any, number_type: type, hint: Any) -> str:
    number = _number(value)
    if number is None:
        return ""
    if number_type is int and isinstance(number, float):
        number = round(number)
    for meta in get_args(hint)[1:]:
        number = number if meta.ge is None else max(number, meta.ge)
        number = number if meta.le is None else min(number, meta.le)
    try:
        msgspec.convert(number, hint)
    except msgspec.ValidationError:  # a bound that is itself excluded has no nearest number
        return ""
    return f"nearest: {written(number)}" if number != value else f"write {written(number)}"


def _number(value: Any) -> int | float | None:
    """The number that was meant, also where it was written in quotes."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        for read in (int, float):
            try:
                value = read(value)
                break
            except ValueError:
                continue
    finite = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    return value if finite else None
