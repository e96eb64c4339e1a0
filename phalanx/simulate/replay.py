"""The story of one seed: around its first violation, or all of it."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.simulate.runner import played
from phalanx.simulate.scenario import Scenario
from phalanx.simulate.story import clock


def story_of(scenario: Scenario, seed: int) -> Iterator[str]:
    """Lines for a person."""
    if scenario.chaos is not None:
        from phalanx.simulate.chaos.runner import chaos_story

        yield from chaos_story(scenario, seed)
        return
    _, world, _ = played(scenario, seed, loud=True)
    found = world.checks.found
    for violation in found:
        yield f"VIOLATION {violation}"
    if found:
        yield f"around {clock(found[0].time_ns).strip()}:"
        yield from world.story.around(found[0].time_ns)
    else:
        yield from world.story.lines()
        yield f"no violation in seed {seed}"
