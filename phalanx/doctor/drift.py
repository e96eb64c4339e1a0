"""Drift of a fleet: which nodes differ from most of their kind in version, setting or speed.

Pure: facts of nodes in, differences out. Where there is no majority (a tie, or fewer than three
nodes of a kind) nobody can say who is off, and nobody is named.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

from phalanx.doctor.acceptance.ranking import LEAST_RANKED, rank

Aspect = Literal["version", "setting", "hardware", "speed"]
SAME_SPEED = 0.05  # two measurements that are this close are the same speed


class NodeFact(Struct, frozen=True, kw_only=True):
    """One thing that is known of a node, and since when it is so."""

    node: str
    kind: str  # of its GPUs; "": none
    aspect: Aspect
    key: str  # "driver", "os.thp", "gemm cuda:0"
    value: str  # a speed: a number
    since_ns: int
    before: str = ""  # what it was until then; "": nothing else is known


class Difference(Struct, frozen=True, kw_only=True):
    """A node that is not as most of its kind are."""

    node: str
    kind: str
    aspect: Aspect
    key: str
    value: str
    usual: str
    share: float = 0.0  # a speed: of the usual one
    alike: int  # nodes that have the usual value
    nodes: int  # that are compared
    since_ns: int
    before: str = ""


class Undecided(Struct, frozen=True, kw_only=True):
    """Something in which nodes of a kind differ, and nobody is the odd one out."""

    kind: str
    aspect: Aspect
    key: str
    nodes: int
    values: int
    why: str


class Drift(Struct, frozen=True, kw_only=True):
    """What was found."""

    differences: list[Difference]
    undecided: list[Undecided]
    compared: dict[str, int]  # nodes by kind


def find_drift(facts: Iterable[NodeFact]) -> Drift:
    """Compares every fact of a node with the same fact of the others of its kind."""
    groups: dict[tuple[str, Aspect, str], list[NodeFact]] = defaultdict(list)
    members: dict[str, set[str]] = defaultdict(set)
    for fact in facts:
        groups[fact.kind, fact.aspect, fact.key].append(fact)
        members[fact.kind].add(fact.node)
    differences: list[Difference] = []
    undecided: list[Undecided] = []
    for (_, aspect, _), group in sorted(groups.items()):
        compare = _speeds if aspect == "speed" else _values
        found = compare(sorted(group, key=lambda fact: fact.node))
        differences += found if isinstance(found, list) else []
        undecided += [found] if isinstance(found, Undecided) else []
    return Drift(
        differences=differences,
        undecided=undecided,
        compared={kind: len(names) for kind, names in sorted(members.items())},
    )


def _undecided(group: list[NodeFact], values: int, why: str) -> Undecided:
    first = group[0]
    return Undecided(
        kind=first.kind,
        aspect=first.aspect,
        key=first.key,
        nodes=len(group),
        values=values,
        why=why,
    )


def _values(group: list[NodeFact]) -> list[Difference] | Undecided:
    counts = Counter(fact.value for fact in group)
    if len(counts) == 1:
        return []
    if len(group) < LEAST_RANKED:
        return _undecided(group, len(counts), f"fewer than {LEAST_RANKED} nodes say it")
    usual, alike = counts.most_common(1)[0]
    if 2 * alike <= len(group):
        return _undecided(group, len(counts), "no value has a majority")
    return [_difference(fact, usual, alike, len(group)) for fact in group if fact.value != usual]


def _speeds(group: list[NodeFact]) -> list[Difference] | Undecided:
    rates = {fact.node: float(fact.value) for fact in group}
    if len(group) < LEAST_RANKED:
        return _undecided(
            group, len(set(rates.values())), f"fewer than {LEAST_RANKED} nodes say it"
        )
    ranked = rank(rates)
    slow = {each.name: each for each in ranked if each.slow}
    usual = sorted(rates.values())[(len(rates) - 1) // 2]
    return [
        _difference(fact, f"{usual:.6g}", len(group) - len(slow), len(group), slow[fact.node].share)
        for fact in group
        if fact.node in slow
    ]


def _difference(
    fact: NodeFact, usual: str, alike: int, nodes: int, share: float = 0.0
) -> Difference:
    return Difference(
        node=fact.node,
        kind=fact.kind,
        aspect=fact.aspect,
        key=fact.key,
        value=fact.value,
        usual=usual,
        share=share,
        alike=alike,
        nodes=nodes,
        since_ns=fact.since_ns,
        before=fact.before,
    )


def same_speed(old: str, new: str) -> bool:
    """Whether a node is as fast as it was: measurements stray a little."""
    before, now = float(old), float(new)
    return abs(now - before) <= SAME_SPEED * max(abs(before), abs(now))
