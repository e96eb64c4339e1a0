"""What is wrong with a configuration: the key, the value, the rule and the nearest fix."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from msgspec import Struct

MOST_PROBLEMS = 100  # that are looked for: who sends a million keys learns of the first
Change = Mapping[str, Any]  # settings by dotted key


class ConfigProblem(Struct, frozen=True, omit_defaults=True):
    """One mistake in a configuration."""

    key: str
    value: str  # as the user would write it
    rule: str
    fix: str
    # Other fixes, before it is known whether rules accept them: of each group the first that is.
    tries: tuple[Sequence[Change], ...] = ()

    def __str__(self) -> str:
        """``key = value: rule; fix``."""
        subject = f"{self.key} = {self.value}" if self.value else self.key
        return f"{subject}: {self.rule}; {self.fix}"


class ConfigError(Exception):
    """A configuration that cannot run; ``problems`` holds every mistake that was found."""

    def __init__(self, key: str, value: object, rule: str, fix: str) -> None:
        self.problems: tuple[ConfigProblem, ...] = (problem(key, value, rule, fix),)
        super().__init__(str(self.problems[0]))

    @classmethod
    def of(cls, problems: Iterable[ConfigProblem]) -> ConfigError:
        """One error for several mistakes, each of which is told once."""
        collected = tuple({str(each): each for each in problems}.values())
        error = cls(collected[0].key, collected[0].value, collected[0].rule, collected[0].fix)
        error.problems = collected
        error.args = ("\n".join(map(str, collected)),)
        return error


def first_of(problems: Iterable[ConfigProblem]) -> list[ConfigProblem]:
    """The first of many mistakes, which are found one by one, and that there are more."""
    first = list(islice(problems, MOST_PROBLEMS + 1))
    if len(first) > MOST_PROBLEMS:
        rule = f"is the first of more than {MOST_PROBLEMS} mistakes, which are not looked for"
        first[-1] = problem(first[-1].key, first[-1].value, rule, "mend those before it first")
    return first


def problem(
    key: str, value: object, rule: str, fix: str, *tries: Sequence[Change]
) -> ConfigProblem:
    """A mistake, with its value written as TOML would."""
    return ConfigProblem(key, value if isinstance(value, str) else written(value), rule, fix, tries)


def written(value: object) -> str:
    """A value as the user would write it in TOML."""
    if value is None:
        return '"none"'
    if isinstance(value, float):
        return repr(value)
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text.replace("\x7f", "\\u007f")  # TOML, unlike JSON, wants this one escaped


def plain_reason(error: Exception) -> str:
    """What the system says about a file, without the number and path of Python's sentence."""
    if isinstance(error, UnicodeDecodeError):
        return f"it is not text in UTF-8 (byte {error.start:,})"
    return (isinstance(error, OSError) and error.strerror) or str(error)


def near(word: str, known: Sequence[str]) -> str:
    """The known word most like this one, or ""."""
    return next(iter(difflib.get_close_matches(word, known, n=1, cutoff=0.6)), "")


def did_you_mean(word: str, candidates: Sequence[str]) -> str:
    """``did you mean "…"?`` for the nearest known word, or the list of known words."""
    match = near(word, candidates)
    return f'did you mean "{match}"?' if match else "known: " + ", ".join(candidates)


def first_line(error: BaseException) -> str:
    """The first line of what an error says; its kind where it says nothing."""
    return next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)
