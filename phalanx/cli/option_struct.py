"""Commands that receive their options as one struct.

Typer reads a function's signature; a command with twenty options would be declarations for a page.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields
from functools import wraps
from inspect import Parameter
from typing import Any, get_type_hints


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """The fields of a command's first argument, a dataclass, become its options."""
    first = next(iter(inspect.signature(command, eval_str=True).parameters.values()))
    struct = first.annotation
    kinds = get_type_hints(struct, include_extras=True)
    declared = [
        option(field.name, kinds[field.name], field.default)
        if field.default is not MISSING
        else Parameter(field.name, Parameter.KEYWORD_ONLY, annotation=kinds[field.name])
        for field in fields(struct)
    ]
    return with_options(command, declared, struct)


def option(name: str, kind: Any, default: Any) -> Parameter:
    """A parameter as Typer reads it; its type is annotated with the option."""
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def with_options(
    command: Callable[..., None], declared: Iterable[Parameter], struct: Callable[..., Any]
) -> Callable[..., None]:
    """A command with these options before its own; its first argument is the struct of them."""
    declared = list(declared)
    names = [parameter.name for parameter in declared]
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    everything = [
        *declared,
        *(parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in own),
    ]

    @wraps(command)
    def wrapper(**given: Any) -> None:
        options = struct(**{name: given.pop(name) for name in names})
        command(options, **given)

    wrapper.__signature__ = inspect.Signature(everything)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in everything}
    return wrapper
