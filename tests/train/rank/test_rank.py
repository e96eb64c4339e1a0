"""One rank, whoever orders it: for one formation alone, or through generations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from phalanx.config import Job
from phalanx.train.exits import ExitCode, ExitInfo
from phalanx.train.rank.local_orders import LocalOrders
from phalanx.train.rank.orders import Formation, GenerationOver, Orders
from phalanx.train.rank.rank import Rank
from phalanx.train.report.records import StepRecord, StepWaits, read_records
from phalanx.train.report.run_folder import RunFolder
from phalanx.train.resume.ordered import RestorePoint
from tests.ranks import run_alone
from tests.train.forked_runs import small_job


class Played(LocalOrders):
    """An agent's orders to a gang of one; its first generation is over at step 3."""

    keeps_process = True

    def __init__(self, meeting: Path) -> None:
        super().__init__()
        self._meeting, self._generation = meeting, 0
        self.said: list[str] = []

    def formation(self) -> Formation | None:
        self._generation += 1
        return Formation(self._generation, 0, 1, 0, host="127.0.0.1", port=1, prefix="played")

    def meet(
        self, formation: Formation, job: Job, device: torch.device, folder: RunFolder | None
    ) -> RunFolder:
        store = dist.FileStore(f"{self._meeting}-{formation.generation}", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        assert folder is not None
        return folder

    def restore_point(self) -> RestorePoint:
        return RestorePoint(0, "none") if self._generation == 1 else RestorePoint(2, "peer")

    def restored(
        self,
        point: RestorePoint,
        refused: str = "",
        skipped: tuple[int, int] = (0, 0),
        there: tuple[int, ...] | None = None,
    ) -> None:
        self.said.append(f"restored {point.step} {refused}".strip())

    def stepped(self, step: int, durable: int, seconds: StepWaits) -> None:
        if (self._generation, step) == (1, 3):
            raise GenerationOver

    def left(self, lost_peer: str = "") -> None:
        self.said.append(f"left {lost_peer}".strip())


def _through_two_generations(job: Job, folder: Path) -> tuple[int, ExitInfo | None, list[str]]:
    orders = Played(folder / "meeting")
    rank = Rank(job, orders, RunFolder(folder / "run"))
    return rank.run(), rank.info, orders.said


def test_a_rank_leaves_a_generation_and_goes_on_in_the_next(tmp_path: Path) -> None:
    job = small_job(tmp_path / "runs", 1, train__steps=5, checkpoint__keeper_lease=5.0)
    code, info, said = run_alone(_through_two_generations, job, tmp_path)
    assert (code, info.reason, info.step) == (ExitCode.DONE, "done", 5)
    assert said == ["restored 0", "left", "restored 2"]
    records = read_records(RunFolder(tmp_path / "run").steps, StepRecord)
    assert [record.step for record in records if record.generation == 2] == [3, 4, 5]


def test_local_orders_are_orders_for_one_formation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    orders: Orders = LocalOrders()
    formation = orders.formation()
    assert formation is not None and (formation.rank, formation.supervised) == (1, False)
    assert orders.formation() is None
    assert orders.write_lease() is None and orders.shares() == () and not orders.over()
