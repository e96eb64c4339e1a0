"""Fair share: what each team used of late, decayed, against the share its weight gives it.

Usage halves with every ``half_life_ns``, in 256 steps a half-life. All of it is integer
arithmetic, so that every machine decides alike.
"""

from __future__ import annotations

from functools import cache
from math import isqrt

STEPS = 256  # of decay in a half-life
ONE = 1 << 32
MS = 1_000_000


@cache
def _halvings() -> tuple[int, ...]:
    """ONE * 2 ** (-i / STEPS), from eight square roots of a half."""
    bits = 192
    roots = [1 << (bits - 1)]  # 2 ** -1, then its root, and so on: 2 ** (-1 / 2 ** k)
    for _ in range(STEPS.bit_length() - 1):
        roots.append(isqrt(roots[-1] << bits))
    halvings = []
    for step in range(STEPS):
        product = 1 << bits
        for power in range(1, len(roots)):
            if step & STEPS >> power:
                product = product * roots[power] >> bits
        halvings.append(product >> (bits - 32))
    return tuple(halvings)


def half_to(steps: int) -> int:
    """ONE * 2 ** (-steps / STEPS)."""
    return _halvings()[steps % STEPS] >> min(steps // STEPS, 64)


def accrue(
    usage: dict[str, int], held_gpus: dict[str, int], since_ns: int, now_ns: int, half_life_ns: int
) -> None:
    """Adds what teams held since then (GPU-milliseconds) and lets the past decay.

    Decay happens at fixed times, and time is counted in whole milliseconds, so that a period adds
    the same whether it is counted in one call or in many.
    """
    since_ms, now_ms = since_ns // MS, now_ns // MS
    if since_ms >= now_ms:
        return
    step_ms = max(1, half_life_ns // STEPS // MS)
    last, factor = now_ms // step_ms, half_to(1)  # last: when it decays last, in steps
    for team in dict.fromkeys([*usage, *held_gpus]):
        gpus, used, at_ms = held_gpus.get(team, 0), usage.get(team, 0), since_ms
        for step in range(since_ms // step_ms + 1, last + 1):
            passed, at_ms = step * step_ms - at_ms, step * step_ms
            before, used = used, (used + gpus * passed) * factor >> 32
            if used == before and passed == step_ms:
                at_ms = last * step_ms  # from here on a step takes what it brings
                break
        used += gpus * (now_ms - at_ms)
        if used or team in usage:
            usage[team] = used


def factors(usage: dict[str, int], weights: dict[str, int]) -> dict[str, int]:
    """For each team that has a weight: 2 ** -(its part of usage / its part of weights), of ONE.

    ONE: it used nothing; half: exactly its share; towards 0: far more.
    """
    used = sum(usage.get(team, 0) for team in weights)
    total = sum(weights.values())
    if not used:
        return dict.fromkeys(weights, ONE)
    return {
        team: half_to(STEPS * usage.get(team, 0) * total // (used * weight))
        for team, weight in weights.items()
    }
