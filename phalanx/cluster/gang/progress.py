"""How far a gang is: its steps, their time, and the checkpoints that are safe."""

from __future__ import annotations

from msgspec import structs

from phalanx.cluster.context import Context
from phalanx.cluster.gang.phases import gang_of
from phalanx.cluster.jobs import write_leases as storage
from phalanx.cluster.jobs.job import ClusterJob
from phalanx.cluster.jobs.measured import progressed, reports_steps
from phalanx.cluster.protocol.events import Progress
from phalanx.cluster.protocol.messages import StepsPrinted
from phalanx.cluster.reasons import reason
from phalanx.cluster.units import SECOND_NS

UNSAVED_PERIODS = 3  # without a durable checkpoint that was due: something is wrong
UNSAVED_NS = 60 * SECOND_NS


def on_progress(ctx: Context, fact: Progress) -> ClusterJob | None:
    """Takes over how far a gang is; a fact about an older generation only settles the ledger."""
    job = ctx.view.jobs.get(fact.job)
    if job is None or job.gang is None or fact.generation > job.generation:
        return None
    gang = job.gang
    current = fact.generation == job.generation and gang.phase in ("running", "draining")
    if not current and ctx.ledger.accounts[job.id].open is None:
        if fact.generation == job.generation:  # whoever joins says how far the last one came
            _learn(job, fact)
        return None
    steps = fact.step - ctx.ledger.accounts[job.id].step
    passed = fact.at_ns - ctx.ledger.accounts[job.id].settled_ns
    first = current and ctx.ledger.accounts[job.id].step == gang.restored
    # A program starts, imports and loads before its first step; our trainer did that before.
    starts = first and not job.spec.reports_steps
    if starts and job.step_ns:
        fact = structs.replace(fact, busy_ns=min(passed, steps * job.step_ns))
    ctx.ledger.progress(job, fact)
    _learn(job, fact)
    if current and steps > 0 and job.agent_ends:
        job.agent_ends = ()  # its start ends no agents
    if current and steps > 0:
        job.former = None  # it can be what it was changed to
    if current and steps > 0 and passed > 0:
        if first:
            job.first_step_ns = max(job.first_step_ns, passed)
        if not starts:
            measured = passed // steps
            job.step_ns = measured if not job.step_ns else (3 * job.step_ns + measured) // 4
        progressed(job, fact, steps)
    if current and fact.flush_ns:
        storage.flushed(ctx, job, fact.flush_ns)
    if current:
        _tell_unsaved(ctx, job, fact.step)
    return job


def on_printed(ctx: Context, fact: StepsPrinted) -> None:
    """A program prints how far it is: shown and accounted for, and no reason for anything else."""
    job = ctx.live(fact.job, fact.generation)
    if job is None or job.placement is None or reports_steps(job):
        return
    if gang_of(job).phase not in ("running", "draining") or fact.node not in job.placement.nodes:
        return
    printed = job.printed
    if printed is not None and printed.generation == fact.generation:
        if fact.step <= printed.step:
            return
        measured = max(0, fact.at_ns - printed.at_ns) // (fact.step - printed.step)
        usual = job.printed_step_ns
        job.printed_step_ns = (3 * usual + measured) // 4 if usual else measured
    ctx.ledger.printed(job, fact)
    job.printed = fact


def _learn(job: ClusterJob, fact: Progress) -> None:
    """How far a gang is, as all of its nodes say."""
    job.step = max(job.step, fact.step)
    job.committed = max(job.committed, fact.committed)
    taken_back = 0 <= gang_of(job).rollback < fact.durable
    if fact.durable <= fact.step and not taken_back:
        job.add_durable(fact.durable)


def _tell_unsaved(ctx: Context, job: ClusterJob, step: int) -> None:
    """Durable checkpoints that fail do not stop a job: that they are missing is said, once each."""
    every, behind = job.spec.expected.checkpoint_steps, step - job.durable
    if job.spec.plan is not None and job.spec.plan.origins.get("checkpoint_steps") == "planned":
        return  # the trainer finds its own interval, which may be longer
    if not every or behind < UNSAVED_PERIODS * every or job.unsaved_since == job.durable:
        return
    if behind * job.step_ns < UNSAVED_NS + job.spec.expected.flush_ns:
        return  # short steps: the last one may still be on its way
    job.unsaved_since = job.durable
    told = reason("unsaved", steps=behind, durable=job.durable, every=every)
    ctx.notify(told, job=job.id, level="error")
