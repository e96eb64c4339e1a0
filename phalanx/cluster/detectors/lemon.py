"""Nodes that fail again and again although every test passes."""

from __future__ import annotations

from collections.abc import Iterable

INCIDENT = 1000  # thousandths


def score(ages_ns: Iterable[int], half_life_ns: int) -> int:
    """Thousandths of an incident: each counts 1000 when it is new and half after a half-life."""
    total = 0
    for age in ages_ns:
        halvings, rest = divmod(age, half_life_ns)
        whole = INCIDENT >> min(halvings, 60)
        total += whole - whole * rest // (2 * half_life_ns)
    return total
