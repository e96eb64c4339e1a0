"""The example from raw text to the registry, killed at random moments: the same hashes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.pipeline import contents, prepare, run, run_killed
from phalanx.pipelines.registry.models import ModelRegistry

KILLS = 20


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_killed_at_random_moments_the_example_ends_with_the_same_hashes(tmp_path: Path) -> None:
    calm = prepare(tmp_path / "calm")
    seconds = run(calm)
    draws, kills = random.Random(), 0
    while kills < KILLS:
        folder = prepare(tmp_path / f"killed-{kills}")
        killed = run_killed(folder, KILLS - kills, draws, seconds / 3)
        assert contents(folder) == contents(calm) and killed.repeated == 0
        models = ModelRegistry(folder / "runs" / "models")
        assert [each.version for each in models.versions("python-text")] == [1]
        kills += killed.kills
