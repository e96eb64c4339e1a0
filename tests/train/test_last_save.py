"""The last checkpoint is written by whoever comes next, if those who made the step could not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from phalanx.checkpoint import Checkpointer, latest
from phalanx.checkpoint.keeper.messages import SaveOutcome
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


def _save_only(job: Job, folder: Path) -> tuple[str, int, str]:
    device = torch.device("cpu")
    trainer = Trainer(job, build_mesh(job, device), device)
    trainer.step, trainer.unsaved = 2, True
    checkpointer = Checkpointer(folder / "checkpoints")
    where, orders = run_folder.create(job), LocalOrders()
    info = loop.train(loop.attach(trainer, where, Sinks([]), checkpointer, orders, saves_only=True))
    trainer.close()
    return info.reason, trainer.step, info.checkpoint


def test_a_rank_that_is_told_to_save_only_makes_no_step(tmp_path: Path) -> None:
    """Whatever the job says of the state at its end: the run may be continued."""
    job = small_job(tmp_path, 1, checkpoint__at_end="false")
    ((reason, step, path),) = run_ranks(1, _save_only, job, tmp_path)
    assert (reason, step) == ("drain", 2)
    assert path.endswith("step-00000002")


class Lease:
    """Leave to write is given two steps after it is asked for."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self._steps = 0

    def ask_lease(self) -> None:
        self.said.append("asked")

    def may_write(self) -> int | None:
        self._steps += bool(self.said)
        return 0 if self._steps > 1 else None

    def used_lease(self) -> None:
        self.said.append("used")


def _with_leave(job: Job, folder: Path) -> tuple[list[str], list[str]]:
    device = torch.device("cpu")
    trainer = Trainer(job, build_mesh(job, device), device)
    checkpointer = Checkpointer(folder / "checkpoints")
    lease = Lease()
    where, orders = run_folder.create(job), LocalOrders()
    loop.train(loop.attach(trainer, where, Sinks([]), checkpointer, orders, lease=lease))
    trainer.close()
    return lease.said, sorted(path.name for path in (folder / "checkpoints").glob("step-*"))


def test_a_checkpoint_waits_until_all_have_leave_to_write(tmp_path: Path) -> None:
    job = small_job(tmp_path, 1, checkpoint__every=2, checkpoint__at_end="false", train__steps=5)
    ((said, saved),) = run_ranks(1, _with_leave, job, tmp_path)
    assert said == ["asked", "asked", "used"]  # at steps 2 and 3, and the save of step 4
    assert saved == ["step-00000004"]
