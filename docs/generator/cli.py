"""The command line as pages: every command with its arguments and options, a page a panel."""

from __future__ import annotations

import enum
import importlib
import inspect
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from typer.utils import get_params_from_function

from docs.generator.markdown import anchor, code, paragraphs, prose, table
from phalanx.cli.app import COMMANDS, OF_THE_ROOT, PANELS

WORDS = {int: "integer", float: "number", str: "text", Path: "path", bool: "flag"}


def index() -> list[str]:
    """All commands by panel, each with a link."""
    lines: list[str] = []
    for panel, commands in PANELS.items():
        page = f"cli-{panel.lower()}.md"
        lines += [f"## [{panel}]({page})", ""]
        rows = [
            (f"[`phalanx {name}`]({page}#{anchor(f'phalanx {name}')})", summary)
            for name, summary in commands.items()
        ]
        lines += [*table(("command", "what it does"), rows), ""]
    return lines


def panel(name: str) -> list[str]:
    """All commands of a panel with their options."""
    lines: list[str] = []
    for command in PANELS[name]:
        app = importlib.import_module(COMMANDS[command].module).app
        lines += _described(typer.main.get_command(app), f"phalanx {command}", 2)
    return lines


# Any, because releases of Typer differ in whether these types are click's or their own.


def _described(command: Any, path: str, level: int) -> Iterator[str]:
    yield f"{'#' * level} `{path}`"
    yield ""
    yield "```"
    yield usage(command, path)
    yield "```"
    yield ""
    yield from paragraphs(inspect.cleandoc(command.help or ""))
    yield from parameters(command)
    for name, below in sorted(getattr(command, "commands", {}).items()):
        yield from _described(below, f"{path} {name}", level + 1)


def parameters(command: Any) -> list[str]:
    """The table of its arguments and options, where it has some."""
    rows = list(_rows(command))
    head = ("argument or option", "value", "default", "meaning")
    return [*table(head, rows), ""] if rows else []


def usage(command: Any, path: str) -> str:
    """How it is called."""
    words = [path]
    shown = [each for each in command.params if not _hidden(each)]
    if any(_is_option(each) for each in shown):
        words.append("[OPTIONS]")
    for each in shown:
        if not _is_option(each):
            name = _metavar(each)
            words.append(name if each.required or name.startswith("[") else f"[{name}]")
    if getattr(command, "commands", None):
        words.append("[COMMAND]" if command.invoke_without_command else "COMMAND")
    return " ".join(words)


def _rows(command: Any) -> Iterator[tuple[str, str, str, str]]:
    kinds = _annotations(command)
    for each in command.params:
        if _hidden(each):
            continue
        kind = kinds.get(each.name, str)
        if _is_option(each):
            names = ", ".join(code(name) for name in (*each.opts, *each.secondary_opts))
            value = _metavar(each) or value_of(kind)
        else:
            names, value = code(_metavar(each)), value_of(kind)
        if each.multiple or (each.nargs == -1 and _is_option(each)):
            value += ", repeatable"
        yield names, value, _default(each), prose(each.help or "")


def _hidden(parameter: Any) -> bool:
    return bool(parameter.hidden) or parameter.name in (*OF_THE_ROOT, "help")


def _is_option(parameter: Any) -> bool:
    return bool(parameter.opts[0].startswith("-"))


def _metavar(parameter: Any) -> str:
    given = parameter.metavar or ""
    return given if given or _is_option(parameter) else str(parameter.name).upper()


def _annotations(command: Any) -> dict[str, Any]:
    callback = getattr(command.callback, "__wrapped__", command.callback)
    if callback is None:
        return {}
    return {name: each.annotation for name, each in get_params_from_function(callback).items()}


def value_of(kind: Any) -> str:
    """What a value looks like, in words."""
    if get_origin(kind) is Annotated:
        return value_of(get_args(kind)[0])
    if get_origin(kind) in (types.UnionType, typing.Union):
        return value_of(next(each for each in get_args(kind) if each is not type(None)))
    if get_origin(kind) is Literal:
        return ", ".join(code(str(each)) for each in get_args(kind))
    if get_origin(kind) in (list, tuple):
        return value_of(get_args(kind)[0])
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return ", ".join(code(str(each.value)) for each in kind)
    return WORDS.get(kind, "text")


def _default(parameter: Any) -> str:
    value = parameter.default
    if parameter.required:
        return "required"
    if callable(value) or value is None or value is False or value in ("", [], ()):
        return ""
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, list | tuple):
        value = " ".join(str(each) for each in value)
    if value is True:
        return code("on")
    return code(str(value))
