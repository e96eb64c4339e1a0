"""Orders of ranks that nobody supervises: a launcher or ``torchrun`` started them, once."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from phalanx.config import Job
from phalanx.train.measure.sends import time_sends
from phalanx.train.optim.fingerprint import ReplicaDivergence
from phalanx.train.rank.orders import Formation, WriteLease
from phalanx.train.rank.stop import StopFlag
from phalanx.train.report import run_folder
from phalanx.train.report.progress import process_age_seconds
from phalanx.train.report.provenance import write_provenance
from phalanx.train.report.records import StepWaits
from phalanx.train.report.run_folder import RunFolder
from phalanx.train.resume.ordered import RestorePoint
from phalanx.train.resume.parent import find_parents

T = TypeVar("T")


class LocalOrders:
    """What whoever started the ranks put into their environment; a signal may stop them.

    ``listener``: where the launcher has the ranks meet; under ``torchrun`` they have a place.
    """

    keeps_process = False

    def __init__(self, stop: StopFlag | None = None, listener: socket.socket | None = None) -> None:
        self.stop = stop or StopFlag()
        self._listener = listener
        self._parents: tuple[Path | str, ...] = ()
        self._formed = False

    def formation(self) -> Formation | None:
        """The one place there is. Until the first step is made a signal gives the start up."""
        if self._formed:
            return None
        self._formed = True
        self.stop.starting()
        return Formation(
            generation=0,
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            local_rank=int(os.environ["LOCAL_RANK"]),
            supervised=False,
            waited_seconds=process_age_seconds(),
        )

    def meet(
        self, formation: Formation, job: Job, device: torch.device, folder: RunFolder | None
    ) -> RunFolder:
        """The group, the run's folder, and what the run continues: the same on all ranks."""
        self._join_group(formation, job, device)
        first = formation.rank == 0
        if folder is None:  # under torchrun; else the launcher made it
            path = _agreed(run_folder.create(job).path if first else None, device)
            assert path is not None
            folder = RunFolder(path)
        self._parents = tuple(_agreed(find_parents(job) if first else [], device))
        _describe(formation, job, device, folder, self._parents)
        return folder

    def _join_group(self, formation: Formation, job: Job, device: torch.device) -> None:
        cuda = device.type == "cuda"
        backend = "nccl" if cuda else "gloo"
        if cuda and job.memory.offload != "none":
            backend = "cpu:gloo,cuda:nccl"  # norms of offloaded gradients are reduced on the host
        if cuda and job.parallel.pipeline > 1:
            time_sends()
        dist.init_process_group(
            backend,
            store=self._store(formation),
            rank=formation.rank,
            world_size=formation.world_size,
            timeout=timedelta(seconds=job.train.collective_timeout_seconds),
            device_id=device if cuda else None,
        )

    def _store(self, formation: Formation) -> Store | None:
        """Where the ranks find each other; None under torchrun, which has one of its own."""
        if self._listener is None:
            return None
        host, port = self._listener.getsockname()
        if formation.rank != 0:
            self._listener.close()
            return TCPStore(host, port, formation.world_size, is_master=False)
        return TCPStore(
            host,
            port,
            formation.world_size,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=self._listener.detach(),
        )

    def restore_point(self) -> RestorePoint:
        """What the job says."""
        return RestorePoint(0, "none", parents=self._parents)

    def restored(
        self,
        point: RestorePoint,
        refused: str = "",
        skipped: tuple[int, int] = (0, 0),
        there: tuple[int, ...] | None = None,
    ) -> None:
        """Nobody orders another source: what cannot be loaded ends the rank."""

    def go(self) -> None:
        """Ranks wait for each other in their first collective."""

    def write_lease(self) -> WriteLease | None:
        """The storage is not shared out."""
        return None

    def stepped(self, step: int, durable: int, seconds: StepWaits) -> None:
        """Nobody wants to know: the records tell."""

    def busy(self, what: str, step: int) -> None:
        """Nobody wonders."""

    def failure_rate(self) -> None:
        """Nobody counts the failures of this machine alone."""

    def shares(self) -> tuple[int, ...]:
        """As the job says."""
        return ()

    def diverged(self, finding: ReplicaDivergence) -> None:
        """Nobody could decide: replicas are not compared."""
        raise finding

    def over(self) -> bool:
        """Never before its end."""
        return False

    def left(self, lost_peer: str = "") -> None:
        """Nobody waits for it."""


def _agreed(value: T, device: torch.device) -> T:
    """Rank 0's value."""
    shared = [value]
    dist.broadcast_object_list(shared, src=0, device=device)
    return shared[0]


def _describe(
    formation: Formation,
    job: Job,
    device: torch.device,
    folder: RunFolder,
    parents: Sequence[Path | str],
) -> None:
    """Where the run comes from, with the names of all ranks' devices."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    names = [name] * formation.world_size
    dist.all_gather_object(names, name)
    if formation.rank == 0:
        write_provenance(job, folder, names, str(parents[0] if parents else ""))
