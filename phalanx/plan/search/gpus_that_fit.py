"""Which GPUs hold a job's fullest rank, and which settings would make it smaller."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct, structs

from phalanx.config import ConfigError, Job, check
from phalanx.hardware.gpus import gpu
from phalanx.plan.grid import grid_of
from phalanx.plan.memory.deciding_stages import rank_at
from phalanx.plan.memory.peak import memory, rank_memory
from phalanx.plan.question.emit import stage_workloads
from phalanx.plan.workload import Mapping, Software, Workload

GIB = 2**30
SHOWN = ("h100", "h200", "b200", "b300")  # that large models train on, by their memory


class MemoryChange(Struct, frozen=True):
    """A setting, and what the fullest rank needs with it."""

    setting: str
    rank_bytes: int


class MemoryFit(Struct, frozen=True):
    """What the fullest rank of a job needs, by the planner's count, and what holds that."""

    rank_bytes: int
    holds: tuple[str, ...]  # GPUs, the smallest first
    too_small: tuple[str, ...]
    changes: tuple[MemoryChange, ...]  # that would make it smaller, the best first

    @property
    def text(self) -> str:
        """The verdict in words; "" where it fits all of them."""
        if not self.too_small:
            return ""
        where = f"it fits {', '.join(self.holds)}" if self.holds else "it fits no GPU that is known"
        sentence = (
            f"its fullest rank needs about {self.rank_bytes / GIB:.0f} GiB and does not fit"
            f" {', '.join(self.too_small)}; {where}"
        )
        helps = [f"{each.setting} ({each.rank_bytes / GIB:.0f} GiB)" for each in self.changes]
        return sentence + (f"; what would help: {', '.join(helps)}" if helps else "")


def fit_of(job: Job, ranks: int) -> MemoryFit:
    """Where a resolved job fits."""
    needed = _rank_bytes(job)
    shown = [gpu(key) for key in SHOWN]
    names = {each.key: f"{each.key} ({each.memory_bytes / GIB:.0f} GiB)" for each in shown}
    return MemoryFit(
        rank_bytes=needed,
        holds=tuple(names[each.key] for each in shown if needed <= each.memory_bytes),
        too_small=tuple(names[each.key] for each in shown if needed > each.memory_bytes),
        changes=tuple(sorted(_changes(job, ranks, needed), key=lambda each: each.rank_bytes)),
    )


def _changes(job: Job, ranks: int, needed: int) -> Iterator[MemoryChange]:
    """Settings that leave the mesh and the batch alone, each by itself."""
    memory_section, axes, train = job.memory, job.parallel, job.train
    tried = {
        'memory.recompute = "full"': structs.replace(
            job, memory=structs.replace(memory_section, recompute="full")
        ),
        "parallel.zero = 2": structs.replace(
            job, parallel=structs.replace(axes, zero=max(axes.zero, 2))
        ),
        'memory.offload = "optimizer"': structs.replace(
            job, memory=structs.replace(memory_section, offload="optimizer")
        ),
        "train.micro_batch = 1": structs.replace(job, train=structs.replace(train, micro_batch=1)),
    }
    for setting, changed in tried.items():
        try:
            check(changed, ranks)
        except ConfigError:
            continue  # it goes against something else that the job says
        found = _rank_bytes(changed)
        if 20 * found < 19 * needed:  # less would not be worth a change
            yield MemoryChange(setting, found)


def _rank_bytes(job: Job) -> int:
    stages = stage_workloads(job)
    return max(int(memory(each, grid_of([on]), Software()).total[0]) for each, on in stages)


def activation_bytes(job: Job, position: int) -> int:
    """Peak over the run for a pipeline position of a resolved job: what the planner counts."""

    def of_stage(workload: Workload, mapping: Mapping) -> int:
        grid = grid_of([mapping])
        rank = rank_at(workload, grid, Software(), position)
        return int(rank_memory(workload, grid, Software(), rank).activations[0])

    return max(of_stage(*stage) for stage in stage_workloads(job))
