"""Runs that are killed and started again, as a person sees them: what they continue, and say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from phalanx.checkpoint import Checkpointer, CheckpointError, Extra, latest
from phalanx.checkpoint.format.tier import step_of
from phalanx.config import Job
from phalanx.data import Cursor
from phalanx.train.rank.diagnose import classify
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


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_run_above_its_quota_is_told_how_to_make_room(
    tmp_path: Path, start: Start, mode: str
) -> None:
    settings = {"checkpoint__every": 2, "checkpoint__mode": mode, "checkpoint__quota_gb": 1e-6}
    run = start(small_job(tmp_path, 1, train__steps=4, **settings), 1)
    assert run.wait() == 15, run.text
    advice = "remove other checkpoints (phalanx ckpt prune) or raise checkpoint.quota_gb"
    assert "step 2 is NOT SAVED" in run.text and f"what to do: {advice}" in run.text
    assert run.checkpoints[0].problem.endswith(advice)
    assert "checkpoint.resume" not in run.exit.advice


def test_a_run_whose_folder_may_not_be_written_is_not_told_to_load_another(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").touch()
    extra = Extra(tokens=0, cursor=Cursor(), mesh={}, config_hash="")
    with pytest.raises(CheckpointError) as caught:
        Checkpointer(tmp_path / "checkpoints").save(1, {"x": torch.ones(2)}, extra)
    assert f"see why {tmp_path / 'checkpoints'} cannot be written" in classify(caught.value).advice
