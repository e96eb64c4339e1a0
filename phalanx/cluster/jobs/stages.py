"""What a job reads: stages that are changed while it lives, and samples that it never reads.

The stages themselves stand in what it runs, which is the shell's business.
"""

from __future__ import annotations

from phalanx.cluster.jobs.job import ClusterJob, JobSpec, SpecChange

SKIPS_KEPT = 16  # ranges of samples; older ones are in every checkpoint that is left


def only_restages(change: SpecChange, spec: JobSpec) -> bool:
    """Whether the mapping that a job has stays as it is."""
    return change.made_before >= 0 and change.spec.gang == spec.gang


def restage(job: ClusterJob, change: SpecChange) -> None:
    """Another payload, and nothing else: what was measured holds on, and so does a fallback."""
    if job.own is not None:
        job.former, job.own = job.own, change.own or job.own
    job.spec = change.spec


def leave_out(job: ClusterJob, first: int, past: int) -> None:
    """A range of samples is never read."""
    kept = job.skipped[1 - SKIPS_KEPT :]
    older = job.skipped[: len(job.skipped) - len(kept)]
    job.skipped_before += sum(end - begin for begin, end in older)
    job.skipped = (*kept, (first, past))


def left_out(job: ClusterJob) -> tuple[tuple[int, int], ...]:
    """Samples that are never read, sorted and apart; older ranges stand at the beginning."""
    merged = [(0, job.skipped_before)] if job.skipped_before else []
    for first, past in sorted(job.skipped):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(past, merged[-1][1]))
        else:
            merged.append((first, past))
    return tuple(merged)
