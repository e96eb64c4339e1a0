"""Moves that would make room for large gangs; proposed, never made."""

from __future__ import annotations

from phalanx.cluster.state import View


def defragment(view: View) -> tuple[tuple[int, int, int], ...]:
    """Moves (job, from node, to node) that would make whole nodes free; none are made."""
    return ()
