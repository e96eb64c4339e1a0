"""TOML files and ``--set`` overrides in, a typed job out."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from phalanx.config.errors import (
    ConfigError,
    ConfigProblem,
    did_you_mean,
    near,
    plain_reason,
    problem,
)
from phalanx.config.presets import PRESETS
from phalanx.config.schema import Job
from phalanx.config.section import Section
from phalanx.config.toml_text import parse_toml
from phalanx.config.tree import (
    build,
    did_you_mean_key,
    fields,
    file_mistakes,
    named_sections,
    section_in,
)

MOST_CHARACTERS = 1 << 24
MOST_SECTIONS = 32  # far above any tree of ours, far below what recursion bears
TOO_DEEP = ("is nested too deeply", "a key has at most four names, such as model.moe.top_k")


def load_job(path: str | Path, overrides: Sequence[str] = ()) -> Job:
    """The job in a TOML file, with ``key=value`` overrides applied and its preset filled in."""
    return job_from_table(read_table(Path(path)), overrides)


def job_from_table(table: Mapping[str, Any], overrides: Sequence[str] = ()) -> Job:
    """The job a parsed table describes; raises ``ConfigError`` with all mistakes at once."""
    merged, problems = overridden(table, overrides, Job)
    problems += _fill_preset(merged)
    problems += file_mistakes(Job, merged)
    if problems:
        raise ConfigError.of(problems)
    return build(Job, merged)


def overridden(
    table: Mapping[str, Any], overrides: Sequence[str], root: type[Section]
) -> tuple[dict[str, Any], list[ConfigProblem]]:
    """A copy of a table meant to become ``root`` with ``key=value`` texts laid over it."""
    try:
        merged = merge(table, {})
    except RecursionError:
        raise ConfigError("a key", "", *TOO_DEEP) from None
    problems: list[ConfigProblem] = []
    for override in overrides:
        problems += _apply(merged, override, root)
    return merged, problems


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """A new table with ``over`` laid on ``base``, tables merged key by key."""
    merged = {
        key: merge(value, {}) if isinstance(value, Mapping) else value
        for key, value in base.items()
    }
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(value, Mapping):
            merged[key] = merge(below if isinstance(below, Mapping) else {}, value)
        else:
            merged[key] = value
    return merged


def read_table(path: Path) -> dict[str, Any]:
    """The parsed TOML of a file, or what is wrong with it."""
    try:
        with path.open(encoding="utf-8-sig") as file:  # some editors begin a file with a mark
            text = file.read(MOST_CHARACTERS + 1)
        if len(text) > MOST_CHARACTERS:
            rule = f"has more than {MOST_CHARACTERS:,} characters"
            raise ConfigError(str(path), "", rule, "give the path of a TOML file written by hand")
        return parse_toml(text, MOST_CHARACTERS)
    except FileNotFoundError:
        raise ConfigError(str(path), "", "no such file", _nearby_file(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        rule = f"cannot be read: {plain_reason(error)}"
        fix = "give the path of a TOML file that you may read"
        raise ConfigError(str(path), "", rule, fix) from None
    except tomllib.TOMLDecodeError as error:
        fix = "correct it there; strings stand in quotes, tables in [brackets]"
        raise ConfigError(str(path), "", f"is not valid TOML: {error}", fix) from None


def _nearby_file(path: Path) -> str:
    folder = path.parent
    stems = sorted(file.stem for file in folder.glob("*.toml")) if folder.is_dir() else []
    similar = near(path.stem, stems)
    return f'did you mean "{similar}.toml"?' if similar else "give the path of a TOML file"


def _fill_preset(table: dict[str, Any]) -> list[ConfigProblem]:
    # Here, and not on the typed job, because only the table knows which keys were given.
    model = table.get("model")
    name = model.get("preset", "") if isinstance(model, dict) else ""
    if not isinstance(name, str) or not name:
        return []
    if name not in PRESETS:
        return [unknown_preset(name)]
    table["model"] = merge(msgspec.to_builtins(PRESETS[name]), table["model"])
    return []


def unknown_preset(name: str) -> ConfigProblem:
    """The mistake of naming a preset that does not exist."""
    return problem("model.preset", f'"{name}"', "no such preset", did_you_mean(name, list(PRESETS)))


def _apply(table: dict[str, Any], override: str, root: type[Section]) -> list[ConfigProblem]:
    key, equals, text = override.partition("=")
    key = key.strip()
    *sections, name = key.split(".")
    if not equals or not all([*sections, name]):
        return [problem("--set", override, "must be key=value", "e.g. --set train.steps=10")]
    if len(sections) > MOST_SECTIONS:
        return [problem("--set", override, *TOO_DEEP)]
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            fix = did_you_mean_key(root, section)
            return [problem(key, text, f'"{section}" is no table', fix)]
    table[name] = _value(key, text.strip(), root)
    return []


def _value(key: str, text: str, root: type[Section]) -> Any:
    try:
        value = parse_toml(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text  # a string without quotes
    wants_text = _field_type(key, root) is str
    return text if wants_text and not isinstance(value, str) else value


def _field_type(key: str, root: type[Section]) -> Any:
    section: type[Section] | None = root
    hint: Any = None
    for name in key.split("."):
        if section is None:
            section = named_sections(hint)  # the name in a table of sections
            hint = None
        elif name in fields(section):
            hint = fields(section)[name]
            section = section_in(hint)
        else:
            return None
    return hint
