"""Constraints on nodes: ``a100|h100 & nvlink``. ``|`` binds tighter than ``&``; ``!`` negates."""

from __future__ import annotations

import re
from functools import lru_cache

from msgspec import Struct

from phalanx.cluster.node import WORD
from phalanx.config import ConfigError
from phalanx.config.errors import did_you_mean

MOST_CHARACTERS = 2_048
MOST_TERMS = 64
SHOWN = 60  # characters of a text that is refused
NAMED = 8  # features that nobody has, of many

_SIGNS = ("|", "&", "!", "(", ")")
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
    if len(text) > MOST_CHARACTERS:
        rule = f"has more than {MOST_CHARACTERS} characters"
        raise _error(text, rule, "name what nodes have in common")
    tokens = _tokens(text)
    if sum(token not in _SIGNS for token in tokens) > MOST_TERMS:
        rule = f"names more than {MOST_TERMS} features"
        raise _error(text, rule, "name what nodes have in common")
    tokens.reverse()  # the next one is the last: taking it copies nothing
    clauses: list[Clause] = []
    while True:
        clauses.append(_clause(text, tokens))
        if not tokens:
            return tuple(clauses)
        if tokens[-1] != "&":
            raise _error(text, f'"{tokens[-1]}" cannot stand there', "join features with & or |")
        tokens.pop()


def unknown(constraint: Constraint, features: list[str]) -> list[str]:
    """For each feature that no node of the fleet has: the word and the nearest known one."""
    wanted = dict.fromkeys(term.feature for clause in constraint for term in clause)
    there = dict.fromkeys(features)
    missing = [word for word in wanted if word not in there]
    return [f'"{word[:SHOWN]}": {did_you_mean(word[:SHOWN], features)}' for word in missing[:NAMED]]


def _clause(text: str, tokens: list[str]) -> Clause:
    if tokens and tokens[-1] == "(":
        tokens.pop()
        inner = _alternatives(text, tokens)
        if not tokens or tokens[-1] != ")":
            raise _error(text, "a parenthesis is not closed", 'add ")"; "&" stands outside of them')
        tokens.pop()
        return inner
    return _alternatives(text, tokens)


def _alternatives(text: str, tokens: list[str]) -> Clause:
    terms: list[Term] = []
    while True:
        wanted = True
        while tokens and tokens[-1] == "!":
            wanted = not wanted
            tokens.pop()
        if not tokens or tokens[-1] in _SIGNS:
            raise _error(text, "a feature is missing", 'e.g. "a100|h100 & nvlink"')
        terms.append(Term(tokens.pop(), wanted))
        if not tokens or tokens[-1] != "|":
            return tuple(terms)
        tokens.pop()


def _tokens(text: str) -> list[str]:
    tokens: list[str] = []
    end = 0
    text = text.rstrip()
    while end < len(text):
        match = _TOKEN.match(text, end)
        if match is None:
            raise _error(text, f'"{text[end:].strip()[0]}" is no part of a constraint', "")
        tokens.append(match[1])
        end = match.end()
    return tokens


def _error(text: str, rule: str, fix: str) -> ConfigError:
    shown = text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
    return ConfigError("constraint", f'"{shown}"', rule, fix)
