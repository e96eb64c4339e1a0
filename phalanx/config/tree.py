"""Turns untyped tables into the tree of settings, and finds every mistake on the way."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec
from msgspec import Struct

from phalanx.config.errors import ConfigProblem, did_you_mean, first_of, near, problem, written
from phalanx.config.fixes import fix_for
from phalanx.config.schema import Job
from phalanx.config.section import Section

S = TypeVar("S", bound=Section)


class FileKind(Struct, frozen=True):
    """A TOML file that people write: keys that no other one has together, and what reads it."""

    name: str
    keys: tuple[str, ...]
    commands: str


FILE_KINDS = (
    FileKind("a sweep file", ("parameters",), "`phalanx sweep run FILE` reads it"),
    FileKind("a pipeline file", ("steps",), "`phalanx pipeline run FILE` reads it"),
    FileKind("a chaos plan", ("actions",), "`phalanx chaos JOB --plan FILE` reads it"),
    FileKind("a scenario", ("fleet",), "`phalanx simulate FILE` reads it"),
    FileKind("a recipe", ("filter",), "`phalanx data prepare FILE` reads it"),
    FileKind(
        "a job file", ("model", "train"), "`phalanx train FILE` or `phalanx submit FILE` reads it"
    ),
)


@cache
def fields(section: type[Section]) -> dict[str, Any]:
    """Name and type of each field of a section."""
    hints = typing.get_type_hints(section, include_extras=True)
    return {name: hints[name] for name in section.__struct_fields__}


def section_in(hint: Any) -> type[Section] | None:
    """The section that a field holds, if it holds one (``X`` or ``X | None``)."""
    if get_origin(hint) in (dict, tuple):
        return None
    for option in (hint, *get_args(hint)):
        if isinstance(option, type) and issubclass(option, Section):
            return option
    return None


def named_sections(hint: Any) -> type[Section] | None:
    """The section that each entry of a table holds (``dict[str, X]``)."""
    return section_in(get_args(hint)[1]) if get_origin(hint) is dict else None


def listed_sections(hint: Any) -> type[Section] | None:
    """The section that each entry of an array holds (``tuple[X, ...]``)."""
    return section_in(get_args(hint)[0]) if get_origin(hint) is tuple else None


def optional(hint: Any) -> bool:
    """Whether a field may hold None, written as "none"."""
    return type(None) in get_args(hint)


def mistakes(section: type[Section], table: Mapping[str, Any]) -> list[ConfigProblem]:
    """Unknown keys, missing keys and wrong types in a table meant to become ``section``."""
    return first_of(_mistakes(section, table, "", section))


def of_another_kind(table: Mapping[str, Any], keys: Collection[str]) -> ConfigProblem | None:
    """That a table was written for another command, where its keys say so and none of them fits."""
    for other in FILE_KINDS:
        tables = [isinstance(table.get(key), Mapping | list) for key in other.keys]
        if any(tables) and all(key in table and key not in keys for key in other.keys):
            rule = f"is a key of {other.name}, not of this"
            return problem(other.keys[0], "", rule, other.commands)
    return None


def file_mistakes(section: type[Section], table: Mapping[str, Any]) -> list[ConfigProblem]:
    """``mistakes`` of a file; one alone where it is of another kind, as all would be wrong."""
    other = of_another_kind(table, fields(section))
    return [other] if other is not None else mistakes(section, table)


def _mistakes(
    section: type[Section], table: Mapping[str, Any], prefix: str, root: type[Section]
) -> Iterator[ConfigProblem]:
    hints = fields(section)
    for name, value in table.items():
        key = prefix + name
        if name not in hints:
            fix = did_you_mean_key(section, name, root)
            yield problem(key, _short(value), "is no known key", fix)
            continue
        inner = section_in(hints[name])
        if value in ("none", None) and optional(hints[name]):
            continue
        if inner is None:
            yield from _several(key, value, hints[name], default_of(section, name), root)
        elif isinstance(value, Mapping):
            yield from _mistakes(inner, value, key + ".", root)
        else:
            yield problem(key, written(value), "must be a table", f"write [{key}]")
    for name in required(section):
        if name not in table:
            under = f"under [{prefix[:-1]}]" if prefix else "at the top of the file"
            fix = f"add {name} = {allowed(hints[name])} {under}"
            yield problem(prefix + name, "", "is missing", fix)


def _short(value: Any) -> str:
    """A value as written; a table is its keys' business."""
    return "" if isinstance(value, Mapping) else written(value)


def _several(
    key: str, value: Any, hint: Any, default: str, root: type[Section]
) -> Iterator[ConfigProblem]:
    """Mistakes in a field that holds many sections, or none."""
    named, listed = named_sections(hint), listed_sections(hint)
    inner = named or listed
    fits = (named and isinstance(value, Mapping)) or (listed and isinstance(value, list | tuple))
    if inner is None:
        yield from _wrong_value(key, value, hint, default)
        return
    if not fits:
        header = f"[{key}.NAME]" if named else f"[[{key}]]"
        yield problem(key, written(value), f"must be {allowed(hint)}", f"write {header}")
        return
    entries = (
        {f"{key}.{name}": entry for name, entry in value.items()}
        if isinstance(value, Mapping)
        else {f"{key}[{number}]": entry for number, entry in enumerate(value)}
    )
    for name, entry in entries.items():
        if isinstance(entry, Mapping):
            yield from _mistakes(inner, entry, name + ".", root)
        else:
            yield problem(name, written(entry), "must be a table", f"write [{name}]")


@cache
def required(section: type[Section]) -> tuple[str, ...]:
    """Names of the fields of a section that have no default."""
    return tuple(field.name for field in msgspec.structs.fields(section) if field.required)


def did_you_mean_key(section: type[Section], name: str, root: type[Section] = Job) -> str:
    """The nearest known key: in this section, or under the same name in another one."""
    elsewhere = [path for path in paths(root) if path.rsplit(".", 1)[-1] == name]
    if elsewhere and not near(name, list(fields(section))):
        return f'did you mean "{elsewhere[0]}"?'
    return did_you_mean(name, list(fields(section)))


@cache
def paths(section: type[Section], prefix: str = "") -> tuple[str, ...]:
    """Every dotted key below a section, sections included."""
    keys: list[str] = []
    for name, hint in fields(section).items():
        keys.append(prefix + name)
        inner, below = below_field(hint, prefix + name)
        if inner is not None:
            keys.extend(paths(inner, below))
    return tuple(keys)


def below_field(hint: Any, key: str) -> tuple[type[Section] | None, str]:
    """The section whose keys stand below a field, and what they start with."""
    if named_sections(hint):
        return named_sections(hint), f"{key}.NAME."
    if listed_sections(hint):
        return listed_sections(hint), f"{key}[]."
    return section_in(hint), f"{key}."


def _wrong_value(key: str, value: Any, hint: Any, default: str) -> Iterator[ConfigProblem]:
    if isinstance(value, float) and not math.isfinite(value):
        yield problem(key, value, "must be finite", fix_for(value, hint, default))
        return
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError:
        rule = f"must be {allowed(hint)}"
        yield problem(key, written(value), rule, fix_for(value, hint, default))


@cache
def default_of(section: type[Section], name: str) -> str:
    """The default of a field as TOML; "" for a table or where a value must be given."""
    (field,) = (field for field in msgspec.structs.fields(section) if field.name == name)
    if field.required or (section_in(fields(section)[name]) and field.default is not None):
        return ""
    made = field.default_factory
    value: Any = field.default if made is msgspec.NODEFAULT else made()
    return written(value)


def allowed(hint: Any) -> str:
    """What a field accepts, in words."""
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(written(choice) for choice in get_args(hint))
    if get_origin(hint) is Annotated:
        base, *metas = get_args(hint)
        bounds = [
            f"{sign} {_bound(bound)}"
            for meta in metas
            for sign, bound in ((">=", meta.ge), (">", meta.gt), ("<=", meta.le), ("<", meta.lt))
            if bound is not None
        ]
        return f"{allowed(base)} {' and '.join(bounds)}"
    if get_origin(hint) in (types.UnionType, typing.Union):
        return " or ".join(
            '"none"' if option is type(None) else allowed(option) for option in get_args(hint)
        )
    if named_sections(hint):
        return "a table of tables"
    if listed_sections(hint):
        return "an array of tables"
    if get_origin(hint) is dict:
        return f"a table whose values are {allowed(get_args(hint)[1])}"
    if get_origin(hint) is tuple and get_args(hint)[-1] is Ellipsis:
        return f"an array whose entries are {allowed(get_args(hint)[0])}"
    if get_origin(hint) is tuple:
        whole = all(each is int for each in get_args(hint))
        return f"an array of {len(get_args(hint))} {'integers' if whole else 'numbers'}"
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
    return names.get(hint, "a table")


def _bound(bound: float) -> str:
    if isinstance(bound, int):
        if bound == 2**63 - 1:
            return "2^63 - 1"
        power = len(str(bound)) - 1
        return f"10^{power}" if bound == 10**power >= 10**9 else f"{bound:,}"
    return f"{bound:g}"


def build(section: type[S], table: Mapping[str, Any]) -> S:
    """The section a table describes; call ``mistakes`` first."""
    return msgspec.convert(_none_words(section, table), section)


def _none_words(section: type[Section], table: Mapping[str, Any]) -> dict[str, Any]:
    # TOML has no null: the word "none" stands for it where a field is optional.
    plain: dict[str, Any] = {}
    for name, value in table.items():
        hint = fields(section)[name]
        inner, named, listed = section_in(hint), named_sections(hint), listed_sections(hint)
        if optional(hint) and value == "none":
            plain[name] = None
        elif inner is not None and isinstance(value, Mapping):
            plain[name] = _none_words(inner, value)
        elif named is not None:
            plain[name] = {key: _none_words(named, entry) for key, entry in value.items()}
        elif listed is not None:
            plain[name] = [_none_words(listed, entry) for entry in value]
        else:
            plain[name] = value
    return plain
