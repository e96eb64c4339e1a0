"""What the nodes of a job keep in memory after it left them, so that it may go on from there.

A job that lacks a node goes back to the queue, and most of its nodes stay idle until it is whole
again. Their keepers hold its newest steps meanwhile, for a while, unless others get the nodes.
"""

from __future__ import annotations

from phalanx.cluster.context import Context
from phalanx.cluster.gang.losses import in_memory, tell_left
from phalanx.cluster.gang.orders import stop_on
from phalanx.cluster.gang.phases import gang_of
from phalanx.cluster.gang.remembered import Kept
from phalanx.cluster.jobs.job import ClusterJob, Gang
from phalanx.cluster.reasons import Reason, reason


def keep(ctx: Context, job: ClusterJob, keep_ns: int = 0) -> Kept | None:
    """What may stay behind when a job leaves its nodes; None: nothing that is worth it.

    How many steps that is only the keepers know: reports are seconds old.
    """
    gang, policy = gang_of(job), ctx.policy.recovery
    worth = job.spec.expected.snapshot_steps > 0 and gang.rollback < 0
    allowed = policy.peer_memory and policy.keep_memory_ns > 0
    # A spare that keeps a copy goes back to the fleet.
    if not (worth and allowed and in_memory(gang, (gang.backup,))):
        return None
    return Kept(
        nodes=gang.keepers,
        generation=gang.kept_generation,
        buddy_shift=gang.buddy_shift,
        since=gang.kept_from,
        lost=dict(gang.lost),
        token=job.generation,
        keep_ns=keep_ns or policy.keep_memory_ns,
    )


def stay(ctx: Context, job: ClusterJob, kept: Kept) -> None:
    """The job has left; its nodes keep what they have until the time is over."""
    job.kept = kept
    ctx.kept[job.id] = None
    ctx.wake(ctx.now_ns + kept.keep_ns, "kept", job.id, kept.token)
    ctx.notify(reason("kept_memory", seconds=kept.keep_ns // 10**9), job=job.id, level="warning")


def taken_up(ctx: Context, job: ClusterJob) -> Gang:
    """The gang of a job that starts: with what those of its nodes that it had before still hold."""
    kept, placement = job.kept, job.placement
    assert placement is not None
    gang = Gang(reshaped_ns=ctx.now_ns)
    if kept is None:
        return gang
    here = dict.fromkeys(placement.nodes)
    away = {node: "left" for node in kept.nodes if node not in here}
    gang.keepers, gang.kept_generation = kept.nodes, kept.generation
    gang.buddy_shift, gang.kept_from = kept.buddy_shift, kept.since
    gang.lost = {**kept.lost, **away}
    gang.leftover = tuple(node for node in away if node not in kept.lost)
    if in_memory(gang):
        job.kept = None
        del ctx.kept[job.id]
        return gang
    give_up(ctx, job, reason("kept_elsewhere"))
    return Gang(reshaped_ns=ctx.now_ns)


def displace(
    ctx: Context, job: ClusterJob, nodes: tuple[int, ...], spares: tuple[int, ...] = ()
) -> None:
    """A job got nodes: what others still kept there goes, and what is no longer whole with it.

    Not where a slot of theirs fits beside it.
    """
    taken = dict.fromkeys(nodes + spares)
    for number in sorted(ctx.kept):
        other = ctx.view.jobs[number]
        kept = other.kept
        assert kept is not None
        there = (node for node in kept.nodes if node in taken and node not in kept.lost)
        hit = tuple(node for node in there if node in spares or not _fits(ctx, other, node))
        if number == job.id or not hit:
            continue
        kept.lost.update(dict.fromkeys(hit, "displaced"))
        whole = Gang(keepers=kept.nodes, buddy_shift=kept.buddy_shift, lost=kept.lost)
        if in_memory(whole):
            stop_on(ctx, other, hit, keep_snapshots=False)
        else:
            give_up(ctx, other, reason("kept_for_nobody"), hit)


def _fits(ctx: Context, job: ClusterJob, node: int) -> bool:
    """Whether a slot of a job fits into what others leave of a node, or has just got its place."""
    fleet, shape = ctx.fleet, job.spec.gang
    if job.id in fleet.held[node]:
        return True
    return (
        not shape.whole_nodes
        and fleet.free_mask(node).bit_count() >= shape.slot_gpus
        and fleet.free_cpus(node) >= shape.slot_cpus
        and fleet.free_memory(node) >= shape.slot_memory_bytes
    )


def give_up(ctx: Context, job: ClusterJob, why: Reason, also: tuple[int, ...] = ()) -> None:
    """Nobody needs what a job's nodes keep in memory, or nobody can wait for it any longer."""
    kept, job.kept = job.kept, None
    if kept is None:
        return
    del ctx.kept[job.id]
    stop_on(ctx, job, tuple(dict.fromkeys(kept.holders + also)), keep_snapshots=False)
    if not job.ended:
        tell_left(ctx, job, why, again=True)


def holds(job: ClusterJob | None, node: int) -> bool:
    """Whether a node keeps something for a job that waits for nodes."""
    kept = job.kept if job is not None else None
    return kept is not None and node in kept.nodes and node not in kept.lost


def expire(ctx: Context, number: int, token: int) -> None:
    """The time is over, unless the job has started since."""
    job = ctx.view.jobs.get(number)
    if job is not None and job.kept is not None and job.kept.token == token:
        seconds = (job.kept.keep_ns or ctx.policy.recovery.keep_memory_ns) // 10**9
        give_up(ctx, job, reason("kept_too_long", seconds=seconds))
