"""How many examples a property is tried on."""

from __future__ import annotations

from hypothesis import settings

FEWER = 3  # times, where every run draws the same ones


def examples(most: int) -> settings:
    """``most`` where new ones are drawn (`make soak`); a third where each run draws the same."""
    same = bool(settings().derandomize)
    return settings(max_examples=most // FEWER if same else most, deadline=None)
