"""What is wrong with an option or a command, in a sentence that says what to type instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from typer.core import TyperGroup

# Kinds of pydantic's errors, which newer releases of Typer show as they are.
NUMBERS = {
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "bool_parsing": "true or false",
}


BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def say_plainly(error: Exception) -> None:
    """Has an error about a value say in our words what the option takes."""
    errors = getattr(error.__cause__, "errors", None)
    if callable(errors) and hasattr(error, "message"):
        error.message = _sentence(errors()[0], getattr(error, "param", None)) or error.message


def _sentence(refused: dict[str, Any], param: Any) -> str:
    for bound, comparison in BOUNDS.items():
        if bound in refused.get("ctx", {}):
            return f"{refused['input']} must be {comparison} {refused['ctx'][bound]}"
    if refused["type"] == "value_error":
        return str(refused["ctx"]["error"]).removesuffix(".")
    wanted = NUMBERS.get(refused["type"])
    if wanted is None:
        return ""
    usual = getattr(param, "default", None)
    example = f", e.g. {usual}" if isinstance(usual, int | float) else ""
    return f"{refused['input']!r} is not {wanted}{example}"


class FileGroup(TyperGroup):
    """A group of commands; a file in the place of one is told where it belongs."""

    takes: ClassVar[dict[str, str]] = {}  # what to type for a file, by suffix; "": any other

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0] if args else ""
        a_file = bool(Path(name).suffix) or Path(name).exists()
        if name and name not in self.commands and a_file and not ctx.resilient_parsing:
            usage = self.takes.get(Path(name).suffix, self.takes[""]).replace("FILE", name)
            ctx.fail(f"{name!r} is a file and no command; {usage}")
        return super().resolve_command(ctx, args)
