"""Estimate of the activations that one rank of a job keeps for backward."""

from __future__ import annotations

from phalanx.config import Job
from phalanx.plan.memory.deciding_stages import rank_at
from phalanx.plan.memory.peak import rank_memory
from phalanx.plan.question.emit import mapping_of, workload_of
from phalanx.plan.question.workload import Software
from phalanx.plan.search.grid import grid_of


def activation_bytes(job: Job, position: int) -> int:
    """Peak over the step for a pipeline position of a resolved job: what the planner counts."""
    workload, grid = workload_of(job), grid_of([mapping_of(job)])
    rank = rank_at(workload, grid, Software(), position)
    return int(rank_memory(workload, grid, Software(), rank).activations[0])
