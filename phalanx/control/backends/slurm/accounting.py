"""Slurm's accounting beside the ledger: what was paid for, and where it went."""

from __future__ import annotations

import json
from typing import Any

from msgspec import Struct

from phalanx.control.backends.slurm.programs import SlurmCommands, SlurmError


class SlurmAllocation(Struct, frozen=True, kw_only=True):
    """One allocation of a job: a requeued job has several."""

    state: str
    start: int  # seconds since 1970
    elapsed: int  # seconds
    nodes: int
    gpus: int
    counted: bool = True  # False: Slurm knows no GPUs here, and nodes stand for them

    @property
    def gpu_seconds(self) -> int:
        return self.elapsed * self.gpus


class Reconciled(Struct, frozen=True, kw_only=True):
    """Slurm's GPU-seconds of a job, and the ledger's."""

    job: int
    turns: tuple[SlurmAllocation, ...]
    slurm_gpu_seconds: int
    ledger_gpu_seconds: float
    buckets: dict[str, float]  # of the ledger, GPU-seconds
    outside: float  # what Slurm charged while no agent had joined, or after all had left

    @property
    def share(self) -> float:
        """Of what was charged, the part that the ledger explains."""
        return self.ledger_gpu_seconds / self.slurm_gpu_seconds if self.slurm_gpu_seconds else 1.0


def turns_of(programs: SlurmCommands, job: int) -> tuple[SlurmAllocation, ...]:
    """All allocations of a job, requeued ones too (``sacct --duplicates``)."""
    text = programs.run("sacct", "--json", "--duplicates", "--jobs", str(job))
    if not (allocations := read_turns(json.loads(text), job)):
        raise SlurmError(
            f"Slurm's accounting has no job {job}: `sacct --user=$USER` lists those of today"
        )
    return allocations


def read_turns(answer: dict[str, Any], job: int) -> tuple[SlurmAllocation, ...]:
    """What ``sacct --json`` says of a job."""
    allocations = []
    for each in answer.get("jobs", []):
        if int(each["job_id"]) != job:
            continue
        held = {(part["type"], part.get("name", "")): part for part in each["tres"]["allocated"]}
        gpus = next((int(part["count"]) for key, part in held.items() if key[1] == "gpu"), 0)
        nodes = next((int(part["count"]) for key, part in held.items() if key[0] == "node"), 0)
        state = each["state"]["current"]
        turn = SlurmAllocation(
            state=state if isinstance(state, str) else str(state[0]),
            start=int(each["time"]["start"]),
            elapsed=int(each["time"]["elapsed"]),
            nodes=nodes,
            gpus=gpus or nodes,
            counted=gpus > 0,
        )
        allocations.append(turn)
    return tuple(sorted(allocations, key=lambda turn: turn.start))


def reconciled(job: int, turns: tuple[SlurmAllocation, ...], buckets: dict[str, int]) -> Reconciled:
    """Slurm's turns beside the ledger's buckets (GPU-nanoseconds of the same job).

    SlurmError where they cannot be of the same.
    """
    seconds = {name: ns / 1e9 for name, ns in buckets.items() if ns}
    charged, explained = sum(turn.gpu_seconds for turn in turns), sum(seconds.values())
    rounding = sum(turn.gpus for turn in turns)  # Slurm counts whole seconds
    if explained > charged + rounding and all(turn.counted for turn in turns):
        raise SlurmError(
            f"the ledger has {explained:.0f} GPU-seconds, and Slurm charged {charged} for job "
            f"{job}: this is the state of another job; see the folders "
            f"slurm-{job} and slurm-{job}.2"
        )
    return Reconciled(
        job=job,
        turns=turns,
        slurm_gpu_seconds=charged,
        ledger_gpu_seconds=explained,
        buckets=seconds,
        outside=charged - explained,
    )
