"""The story of one seed: around its first violation, or all of it."""

from __future__ import annotations

from msgspec import Struct

from phalanx.simulate.runner import played
from phalanx.simulate.scenario.scenario import Scenario
from phalanx.simulate.story import clock


class SeedStory(Struct, frozen=True, kw_only=True):
    """A seed for a person, and what was wrong with it."""

    seed: int
    story: list[str]
    violations: list[str]
    failures: list[str] = []  # of jobs
    refused: list[str] = []  # why jobs were not taken


def story_of(scenario: Scenario, seed: int) -> SeedStory:
    """Play a seed and tell of it."""
    if scenario.chaos is not None:
        from phalanx.simulate.chaos.runner import chaos_story

        lines, violations = chaos_story(scenario, seed)
        return SeedStory(seed=seed, story=lines, violations=violations)
    result, world, _ = played(scenario, seed, loud=True)
    problems = world.checks.found
    if problems:
        lines = [f"VIOLATION {violation}" for violation in problems]
        lines += [f"around {clock(problems[0].time_ns).strip()}:"]
        lines += world.story.around(problems[0].time_ns)
    else:
        lines = [*world.story.lines(), f"no violation in seed {seed}"]
    return SeedStory(
        seed=seed,
        story=lines,
        violations=[str(violation) for violation in problems],
        failures=list(result.failures),
        refused=list(result.refused),
    )
