"""Committed steps that are gone: each is said once, with how many and why.

What the core knows of a gang's committed step is seconds old. The nodes' last words about a
generation (``GangStopped``) and what joins the next one tell how far it really was; whatever of
that is not gone on from is lost, wherever it is found out: when a job goes on, leaves or ends.
"""

from __future__ import annotations

from msgspec.structs import replace

from phalanx.cluster.context import Context
from phalanx.cluster.gang.remembered import Loss
from phalanx.cluster.jobs.job import ClusterJob, Gang, JobState
from phalanx.cluster.protocol.events import GangStopped
from phalanx.cluster.reasons import Code, Reason, reason

LOSSES_KEPT = 8  # of a job, newest last


class LossNotice(Code):
    """Committed steps are lost, with the facts ``first`` and ``last`` among others."""

    MADE_AGAIN = "given_up"
    FOR_GOOD = "lost_steps"


def in_memory(gang: Gang, empty: tuple[int, ...] = ()) -> bool:
    """Whether every slot's snapshot is in somebody's memory."""
    return bool(gang.keepers) and not without_copy(gang, empty)


def without_copy(gang: Gang, empty: tuple[int, ...] = ()) -> list[int]:
    """Nodes of the last generation that ran whose snapshot nobody has; ``empty``: gone as well."""
    gone, keepers = {**gang.lost, **dict.fromkeys(empty, "empty")}, gang.keepers
    slots = []
    for node in sorted(set(gone).intersection(keepers)) if gone else ():
        if gang.backup >= 0 and gang.backup not in gone:
            continue
        # ``index`` runs over a large gang far faster than a loop would.
        buddy = keepers[(keepers.index(node) + gang.buddy_shift) % len(keepers)]
        if not gang.buddy_shift or buddy in gone:
            slots += [node, buddy] if buddy in gone else [node]
    return list(dict.fromkeys(slots))


def unsaved(job: ClusterJob) -> bool:
    """Whether nodes may keep steps in memory that no checkpoint has.

    How many they are nobody knows before its nodes have said it: reports are seconds old.
    """
    gang = job.gang
    if gang is None or not job.spec.expected.snapshot_steps or not in_memory(gang):
        return False
    if gang.phase == "restoring":
        return gang.memory_step > job.durable
    return job.step > 0


def on_stopped(ctx: Context, fact: GangStopped) -> None:
    """The nodes of a generation that is over tell how far it came."""
    job = ctx.view.jobs.get(fact.job)
    if job is None or fact.generation != job.generation:
        return  # whoever joined the next one has said it
    job.step = max(job.step, fact.step)
    job.kept_step = max(job.kept_step, fact.committed)
    back = _rollback(job)
    if back < 0 or fact.durable <= back:
        job.add_durable(fact.durable)
    if job.gang is None and job.kept is None and job.state in (JobState.PENDING, JobState.FAILED):
        why = job.losses[-1].why if job.lost_up_to else left_unsaved(job.why)
        tell_left(ctx, job, why, again=job.state == JobState.PENDING)


def tell_left(ctx: Context, job: ClusterJob, why: Reason, *, again: bool) -> None:
    """A job has nothing in memory any more: it begins after its newest checkpoint, if ever."""
    last = max(job.committed, job.kept_step)
    _tell(ctx, job, Loss(first=job.durable + 1, last=last, at_ns=ctx.now_ns, why=why), again=again)
    job.committed = min(job.committed, job.durable)
    if again:
        ctx.ledger.roll_back(job.id, job.durable)


def tell_restored(ctx: Context, job: ClusterJob, step: int) -> int:
    """A gang goes on after a step; returns how many committed ones it lost."""
    gang = job.gang
    assert gang is not None
    # Where memory was whole, what is proved to be committed counts: one node alone may be ahead.
    last = job.committed if gang.source == "peer" else max(job.committed, job.kept_step)
    loss = Loss(first=step + 1, last=last, at_ns=ctx.now_ns, why=_why(ctx, gang))
    steps = _tell(ctx, job, loss, again=True)
    job.kept_step = job.lost_up_to = 0
    return steps


def left_unsaved(why: Reason) -> Reason:
    """That a job left without having written its last steps, and what made it leave."""
    return reason("left_unsaved", why=str(why))


def why_gone(ctx: Context, job: ClusterJob, left: Reason) -> Reason:
    """Why the memory of a job that leaves is lost: it was gone before, or goes now."""
    gang = job.gang
    if gang is not None and gang.keepers and not in_memory(gang):
        return _why(ctx, gang)
    return left_unsaved(left)


def _why(ctx: Context, gang: Gang) -> Reason:
    if "peer" in gang.refused:
        return reason("memory_refused", detail=gang.refusal)
    if gone := without_copy(gang):
        return reason("memory_gone", nodes=ctx.fleet.names(tuple(gone)))
    if not ctx.policy.recovery.peer_memory:
        return reason("memory_unused")
    if 0 <= gang.rollback < gang.memory_step:
        return reason("memory_too_new", step=gang.rollback + 1)
    return reason("no_common_step")


def _tell(ctx: Context, job: ClusterJob, loss: Loss, *, again: bool) -> int:
    """Says which committed steps are lost, but those that were said before; how many they are."""
    back = _rollback(job)
    last = loss.last if back < 0 else min(loss.last, back)  # later ones are taken back on purpose
    first = max(loss.first, job.lost_up_to + 1)
    steps = last - first + 1
    if steps <= 0:
        return 0
    job.lost_up_to, job.lost_steps = last, job.lost_steps + steps
    job.losses = (*job.losses[1 - LOSSES_KEPT :], replace(loss, first=first, last=last))
    ctx.ledger.lose(job.id, steps)
    facts: dict[str, int | str] = {"steps": steps, "first": first, "last": last}
    notice = LossNotice.MADE_AGAIN if again else LossNotice.FOR_GOOD
    told = notice.because(**facts, why=str(loss.why))
    ctx.notify(told, job=job.id, level="error")
    return steps


def _rollback(job: ClusterJob) -> int:
    return job.gang.rollback if job.gang is not None else job.rollback
