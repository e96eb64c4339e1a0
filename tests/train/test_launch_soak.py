"""Signals and kills at any moment, the start of a run included."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from phalanx.checkpoint import latest, read_manifest
from phalanx.train.exits import ExitCode
from tests.train.forked_runs import Run, alive, small_job, start

__all__ = ["start"]

Start = Callable[..., Run]


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(12))
def test_a_stop_at_any_moment_saves_and_exits_with_zero(
    tmp_path: Path, start: Start, seed: int
) -> None:
    run = start(small_job(tmp_path, train__steps=100000))
    run.until(lambda: len(run.rank_pids()) == 2)
    time.sleep(random.Random(seed).uniform(0, 1.5))
    run.kill(signal.SIGTERM)
    assert run.wait() == 0
    assert run.exit.reason == "SIGTERM"
    saved = latest(run.folder.checkpoints)
    if run.exit.early:
        assert saved is None
    else:
        assert saved is not None and read_manifest(saved).step == run.exit.step


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(12))
def test_a_rank_killed_at_any_moment_is_named(tmp_path: Path, start: Start, seed: int) -> None:
    chance = random.Random(seed)
    job = small_job(tmp_path, 4, train__steps=100000, checkpoint__every=2)
    run = start(job, 4)
    run.until(lambda: len(run.rank_pids()) == 4)
    ranks, victim = run.rank_pids(), chance.randrange(4)
    time.sleep(chance.uniform(0, 2))
    os.kill(ranks[victim], signal.SIGKILL)
    assert run.wait() == ExitCode.LOST_PEER
    assert (run.exit.rank, run.exit.reason) == (victim, "rank_killed")
    assert not any(alive(pid) for pid in ranks)
