"""Which claims to measure, and in which order, where time is short."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum

from proof.claim import Claim
from proof.history import Measurement, newest


class Standing(IntEnum):
    """What the store knows of a claim; the least is measured first."""

    NEVER = 0  # nothing
    DOUBTFUL = 1  # on busy cores, by another command, or not all of today's figures
    MEASURED = 2


def standing(claim: Claim, measurement: Measurement | None) -> Standing:
    """What the measurement that is shown for a claim is worth."""
    if measurement is None:
        return Standing.NEVER
    whole = all(figure.name in measurement.figures for figure in claim.figures)
    if not measurement.trusted or measurement.by_other_command(claim.command) or not whole:
        return Standing.DOUBTFUL
    return Standing.MEASURED


def most_outdated_first(claims: Iterable[Claim], measurements: list[Measurement]) -> list[Claim]:
    """Those that were never measured, then the doubtful ones, then the oldest.

    By date, and on one day by their place in the store: commits may have left the history.
    """
    shown = newest(measurements)
    places = {id(each): place for place, each in enumerate(measurements)}

    def age(claim: Claim) -> tuple[Standing, str, int]:
        measurement = shown.get(claim.name)
        if measurement is None:
            return Standing.NEVER, "", 0
        return standing(claim, measurement), measurement.date, places[id(measurement)]

    return sorted(claims, key=age)


def that_fit(
    claims: Iterable[Claim], minutes: float, clock: Callable[[], float] = time.monotonic
) -> Iterator[Claim]:
    """The first of the claims that is said to end in time, again and again as time passes."""
    waiting, end = list(claims), clock() + 60 * minutes
    while fitting := [claim for claim in waiting if clock() + 60 * claim.minutes <= end]:
        waiting.remove(fitting[0])
        yield fitting[0]


def said_to_fit(claims: Iterable[Claim], minutes: float) -> list[Claim]:
    """Those that fit when each takes as long as it says."""
    chosen: list[Claim] = []
    for claim in claims:
        if sum(each.minutes for each in (*chosen, claim)) <= minutes:
            chosen.append(claim)
    return chosen
