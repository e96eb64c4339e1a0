"""The story of one seed: around its first violation, or all of it."""

from __future__ import annotations

from msgspec import Struct

from phalanx.simulate.runner import played
from phalanx.simulate.scenario.scenario import Scenario
from phalanx.simulate.show.story import clock


class Told(Struct, frozen=True, kw_only=True):
    """A seed for a person, and what was wrong with it."""

    seed: int
    story: list[str]
    violations: list[str]
    failures: list[str] = []  # of jobs
    refused: list[str] = []  # why jobs were not taken


def story_of(scenario: Scenario, seed: int) -> Told:
    """Play a seed and tell of it."""
    if scenario.chaos is not None:
        from phalanx.simulate.chaos.runner import chaos_story

        lines, violations = chaos_story(scenario, seed)
        return Told(seed=seed, story=lines, violations=violations)
    result, world, _ = played(scenario, seed, loud=True)
    found = world.checks.found
    if found:
        lines = [f"VIOLATION {violation}" for violation in found]
        lines += [f"around {clock(found[0].time_ns).strip()}:"]
        lines += world.story.around(found[0].time_ns)
    else:
        lines = [*world.story.lines(), f"no violation in seed {seed}"]
    return Told(
        seed=seed,
        story=lines,
        violations=[str(violation) for violation in found],
        failures=list(result.failures),
        refused=list(result.refused),
    )
