"""Runs that are killed and started again, as a person sees them: what they continue, and say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from phalanx.checkpoint import latest
from phalanx.checkpoint.tier import step_of
from phalanx.config import Job
from tests.checkpoint.waiting import eventually
from tests.train.forked_runs import Run, alive, small_job, start

__all__ = ["start"]

Start = Callable[..., Run]


def in_memory(runs: Path, **settings: object) -> Job:
    """A job that has every step in memory and nothing on disk before its end."""
    tier = {"checkpoint__memory_every": 1, "checkpoint__interval": "off"}
    return small_job(runs, 1, checkpoint__resume="auto", **tier, **settings)


def killed(run: Run) -> None:
    """Everybody but the keeper, and gone."""
    ranks = run.rank_pids()
    run.end()
    assert eventually(lambda: not any(map(alive, ranks)))


def test_auto_says_that_there_is_nothing(tmp_path: Path, start: Start) -> None:
    run = start(in_memory(tmp_path, train__steps=1), 1)
    assert run.wait() == 0, run.text
    assert "nothing to resume from; starts fresh" in run.text
    plain = start(small_job(tmp_path / "other", 1, train__steps=1), 1)
    assert plain.wait() == 0 and "resume" not in plain.text, "who asks for nothing is told nothing"


def test_what_only_memory_holds_is_saved_although_no_step_is_left(
    tmp_path: Path, start: Start
) -> None:
    first = start(in_memory(tmp_path, train__steps=100000), 1)
    first.until_step(3)
    killed(first)
    assert latest(first.folder.checkpoints) is None
    again = start(in_memory(tmp_path, train__steps=2), 1)
    assert again.wait() == 0, again.text
    saved = latest(again.folder.checkpoints)
    assert saved is not None and step_of(saved.name) >= 2 and not again.steps
    words = f"continues after step {step_of(saved.name)} from the nodes' memory"
    assert words in again.text and "raise train.steps to go on" in again.text
    third = start(in_memory(tmp_path, train__steps=2), 1)
    assert third.wait() == 0, third.text
    assert f"from disk: {saved}" in third.text or "the nodes' memory" in third.text
    assert latest(third.folder.checkpoints) is None, "it is on disk already"


def test_the_memory_of_a_run_at_work_is_nobody_elses(tmp_path: Path, start: Start) -> None:
    first = start(in_memory(tmp_path, train__steps=100000), 1)
    first.until_step(3)
    second = start(in_memory(tmp_path, train__steps=1, checkpoint__at_end="false"), 1)
    assert second.wait() == 0, second.text
    assert "it is of another run that is at work" in second.text
    assert "starts fresh" in second.text and [r.step for r in second.steps] == [1]
    killed(first)
    third = start(in_memory(tmp_path, train__steps=2), 1)
    assert third.wait() == 0, third.text
    assert "from the nodes' memory" in third.text, "the second run did not have it let go"
