"""Constraints on nodes: ``a100|h100 & nvlink``. ``|`` binds tighter than ``&``; ``!`` negates."""

from __future__ import annotations

import re
from functools import lru_cache

from msgspec import Struct

from phalanx.cluster.fleet import WORD
from phalanx.config import ConfigError
from phalanx.config.errors import did_you_mean

_TOKEN = re.compile(rf"\s*([|&!()]|{WORD.pattern})")


class Term(Struct, frozen=True):
    """A feature that must be there, or must not."""

    feature: str
    wanted: bool


Clause = tuple[Term, ...]  # any of these
Constraint = tuple[Clause, ...]  # all of these


def matches(constraint: Constraint, features: tuple[str, ...]) -> bool:
    """Whether a node with these features will do."""
    return all(any((t.feature in features) == t.wanted for t in clause) for clause in constraint)


@lru_cache(maxsize=4096)
def parse(text: str) -> Constraint:
    """The constraint that a text means; "" means any node."""
    if not text.strip():
        return ()
    tokens = _tokens(text)
    clauses: list[Clause] = []
    while True:
        clause, tokens = _clause(text, tokens)
        clauses.append(clause)
        if not tokens:
            return tuple(clauses)
        if tokens[0] != "&":
            raise _error(text, f'"{tokens[0]}" cannot stand there', "join features with & or |")
        tokens = tokens[1:]


def unknown(constraint: Constraint, known: list[str]) -> list[str]:
    """For each feature that no node of the fleet has: the word and the nearest known one."""
    wanted = dict.fromkeys(term.feature for clause in constraint for term in clause)
    return [f'"{word}": {did_you_mean(word, known)}' for word in wanted if word not in known]


def _clause(text: str, tokens: list[str]) -> tuple[Clause, list[str]]:
    if tokens and tokens[0] == "(":
        inner, rest = _alternatives(text, tokens[1:])
        if not rest or rest[0] != ")":
            raise _error(text, "a parenthesis is not closed", 'add ")"; "&" stands outside of them')
        return inner, rest[1:]
    return _alternatives(text, tokens)


def _alternatives(text: str, tokens: list[str]) -> tuple[Clause, list[str]]:
    terms: list[Term] = []
    while True:
        wanted = True
        while tokens and tokens[0] == "!":
            wanted, tokens = not wanted, tokens[1:]
        if not tokens or tokens[0] in "|&()":
            raise _error(text, "a feature is missing", 'e.g. "a100|h100 & nvlink"')
        terms.append(Term(tokens[0], wanted))
        tokens = tokens[1:]
        if not tokens or tokens[0] != "|":
            return tuple(terms), tokens
        tokens = tokens[1:]


def _tokens(text: str) -> list[str]:
    found: list[str] = []
    end = 0
    text = text.rstrip()
    while end < len(text):
        match = _TOKEN.match(text, end)
        if match is None:
            raise _error(text, f'"{text[end:].strip()[0]}" is no part of a constraint', "")
        found.append(match[1])
        end = match.end()
    return found


def _error(text: str, rule: str, fix: str) -> ConfigError:
    return ConfigError("constraint", f'"{text}"', rule, fix)
