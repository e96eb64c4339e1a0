"""An engine's job, read from the folder of its run: its controller need not run any more."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from phalanx.cluster.jobs.job import ClusterJob
from phalanx.cluster.policy import Policy
from phalanx.control.agent.spawn.log_times import bytes_since, read_marks
from phalanx.control.server.http.views import job_detail, names_of
from phalanx.control.server.replay import Recovered, recover
from phalanx.control.server.store.interface import StoreError, open_store
from phalanx.control.wire.api_types import JobDetail

LOG = "log.sqlite"
OUTPUT_FILE = "output.log"  # what ranks printed, where agents' folders are not on shared storage
NUMBER = 1  # of the job at a controller of its own


class StoredRun(Struct, frozen=True, kw_only=True):
    """What is left of a job."""

    folder: Path
    detail: JobDetail
    nodes: tuple[str, ...]  # where it ran last, in the order of its slots
    slot_ranks: int


def is_stored(folder: Path) -> bool:
    """Whether a run's folder has the log of a controller of its own."""
    return (folder / "control" / LOG).exists()


def find_run(which: str, runs: Path = Path("runs")) -> Path | None:
    """The folder of an engine's run, by its path, its name below ``runs/``, or slurm:NUMBER."""
    engine, _, number = which.partition(":")
    if engine == "slurm" and number.isdigit():
        found = sorted(runs.glob(f"*/slurm-{number}*"), key=lambda path: path.name)
        return next((path for path in reversed(found) if is_stored(path)), None)
    return next((path for path in (Path(which), runs / which) if is_stored(path)), None)


def read_run(folder: Path) -> StoredRun:
    """Replay the log of its controller; StoreError where there is none that can be read."""
    if not is_stored(folder):
        raise StoreError(f"{folder / 'control'} holds no log of a controller")
    with tempfile.TemporaryDirectory() as copy:  # reading sets events aside: not in the original
        for path in (folder / "control").glob(f"{LOG}*"):
            shutil.copy(path, copy)
        store = open_store("", Path(copy))
        try:
            recovered = recover(store, Policy())
        finally:
            store.close()
    job = recovered.core.view.jobs.get(NUMBER)
    if job is None:
        raise StoreError(f"the controller in {folder / 'control'} was never given its job")
    return _described(folder, recovered, job)


def _described(folder: Path, recovered: Recovered, job: ClusterJob) -> StoredRun:
    core = recovered.core
    return StoredRun(
        folder=folder,
        detail=job_detail(core, job, core.view.now_ns),
        nodes=names_of(core.view.fleet, recovered.memory.placed.get(job.id, ())),
        slot_ranks=max(1, job.spec.gang.slot_gpus),
    )


def output_of(run: StoredRun, rank: int, tail_bytes: int, since: float = 0.0) -> Iterator[bytes]:
    """The end of what a rank printed, or (-1) of what all ranks of the first node did.

    ``since``: what was written after that time alone, seconds since 1970.
    """
    slot, index = divmod(max(rank, 0), run.slot_ranks)
    logs: list[Path] = []
    if slot < len(run.nodes):
        at = run.folder / "control" / "nodes" / run.nodes[slot] / "jobs" / str(NUMBER)
        logs = sorted(at.glob("worker-*.log")) if rank < 0 else [at / f"worker-{index}.log"]
    logs = [path for path in logs if path.exists()]
    if not logs and (run.folder / OUTPUT_FILE).exists():
        logs = [run.folder / OUTPUT_FILE]
    if not logs:
        raise StoreError(f"{run.folder} has no output of this rank")
    for path in logs:
        size, tail, worker = path.stat().st_size, tail_bytes, path.stem.rpartition("-")[2]
        if since and worker.isdigit():
            tail = min(tail, bytes_since(read_marks(path.parent), int(worker), since, size))
        with path.open("rb") as file:
            file.seek(max(0, size - tail))
            yield file.read()
