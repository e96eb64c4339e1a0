"""Who talks to whom: slots of disjoint pairs of nodes, so that nobody shares a card meanwhile."""

from __future__ import annotations

from collections.abc import Iterable

Pair = tuple[int, int]  # of nodes, the smaller number first
Slot = tuple[Pair, ...]  # pairs that are measured at the same time

LEAST_PEERS = 3  # that tell a bad node from a bad path


def ordered(first: int, second: int) -> Pair:
    """A pair, whichever way round it was named."""
    return (first, second) if first < second else (second, first)


def tournament(nodes: int) -> list[Slot]:
    """Every pair once, in as few slots as there can be; with an odd number one rests in each."""
    places = nodes + nodes % 2
    slots = []
    for turn in range(places - 1):
        # The last one stays, the others move on by one place.
        circle = [(turn + place) % (places - 1) for place in range(places - 1)]
        pairs = [(circle[0], places - 1)]
        pairs += [(circle[at], circle[-at]) for at in range(1, places // 2)]
        slots.append(tuple(ordered(*pair) for pair in pairs if max(pair) < nodes))
    return slots


def logarithmic(nodes: int) -> list[Slot]:
    """So many slots of a tournament, spread over it, as the logarithm of the number of nodes."""
    every = tournament(nodes)
    wanted = min(len(every), max(LEAST_PEERS, (nodes - 1).bit_length()))
    return [every[at * len(every) // wanted] for at in range(wanted)]


def disjoint(wanted: Iterable[Pair]) -> list[Pair]:
    """The first pairs that leave each node with one peer."""
    busy: set[int] = set()
    chosen = []
    for pair in wanted:
        if busy.isdisjoint(pair):
            busy.update(pair)
            chosen.append(pair)
    return chosen
