"""The last checkpoint is written by whoever comes next, if those who made the step could not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from phalanx.checkpoint import Checkpointer, latest
from phalanx.checkpoint.keeper.client import SaveOutcome
from phalanx.config import Job
from phalanx.parallel import build_mesh
from phalanx.train.rank import loop
from phalanx.train.rank.local_orders import LocalOrders
from phalanx.train.report import run_folder
from phalanx.train.report.sinks import Sinks
from phalanx.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.train.forked_runs import small_job


def _continue_at_the_end(job: Job, folder: Path, unsaved: bool) -> str:
    device = torch.device("cpu")
    trainer = Trainer(job, build_mesh(job, device), device)
    trainer.step = job.train.steps
    trainer.unsaved = unsaved
    checkpointer = Checkpointer(folder / "checkpoints")
    folder_of_run, orders = run_folder.create(job), LocalOrders()
    info = loop.train(loop.attach(trainer, folder_of_run, Sinks([]), checkpointer, orders))
    trainer.close()
    assert info.reason == "done"
    found = latest(folder / "checkpoints")
    return found.name if found is not None else ""


@pytest.mark.parametrize("unsaved", [True, False], ids=["from-memory", "from-disk"])
def test_a_run_whose_steps_are_all_made_saves_what_only_memory_has(
    tmp_path: Path, unsaved: bool
) -> None:
    job = small_job(tmp_path, 1, train__steps=2)
    (name,) = run_ranks(1, _continue_at_the_end, job, tmp_path, unsaved)
    assert name.startswith("step-00000002") if unsaved else not name


def _told_in_another_order(job: Job, folder: Path) -> str:
    class Late(Checkpointer):
        def finish(self) -> list[SaveOutcome]:
            return [SaveOutcome(step=step, path=f"step {step}") for step in (2, 1)]

    device = torch.device("cpu")
    trainer = Trainer(job, build_mesh(job, device), device)
    checkpointer = Late(folder / "checkpoints")
    folder_of_run, orders = run_folder.create(job), LocalOrders()
    info = loop.train(loop.attach(trainer, folder_of_run, Sinks([]), checkpointer, orders))
    trainer.close()
    return info.checkpoint


def test_the_newest_checkpoint_is_reported_whichever_was_told_last(tmp_path: Path) -> None:
    job = small_job(tmp_path, 1, train__steps=1, checkpoint__at_end="false")
    assert run_ranks(1, _told_in_another_order, job, tmp_path) == ["step 2"]
