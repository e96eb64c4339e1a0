"""What a job is expected to take, once some of it was measured.

``Job.expected`` is what recovery, forecasts and the ledger reckon with: the plan's times until the
job's own replace them, each of which is marked. Deadlines stay those of the submission: a start
that was fast once must not make the next one fail. Only jobs that the server planned learn: a
simulation's times are those of its world.
"""

from __future__ import annotations

from msgspec import structs

from phalanx.cluster.causes import FormationCause
from phalanx.cluster.jobs.job import ClusterJob, Expected, JobSpec
from phalanx.cluster.plan_record import Origin
from phalanx.cluster.protocol.events import Progress

RESTORES = {"peer": "restore_peer_ns", "disk": "restore_disk_ns", "remote": "restore_remote_ns"}


def reports_steps(job: ClusterJob) -> bool:
    """Whether it is our trainer, or a program that has reported a step."""
    return job.spec.reports_steps or job.step_ns > 0 or job.first_step_ns > 0


def forget(job: ClusterJob) -> None:
    """It has another mapping: what was measured was measured of the one before."""
    job.step_ns, job.revised, job.measured, job.dispute = 0, None, (), None


def learn(job: ClusterJob, **measured_ns: int) -> None:
    """Takes over times that were measured; later ones move an earlier one by a quarter."""
    if job.spec.plan is None or not measured_ns:
        return
    before, measured_before = job.expected, dict.fromkeys(job.measured)
    for name, value in measured_ns.items():
        if name in measured_before:
            measured_ns[name] = (3 * getattr(before, name) + value) // 4
    job.revised = structs.replace(before, **measured_ns)
    job.measured = tuple(sorted({**measured_before, **dict.fromkeys(measured_ns)}))


def joined(job: ClusterJob, cause: str, passed_ns: int) -> None:
    """All workers of a generation have joined, so long after they were ordered."""
    learn(job, **{"start_ns" if cause == FormationCause.START else "standby_ns": passed_ns})


def restored(job: ClusterJob, source: str, passed_ns: int) -> None:
    """A gang has formed its groups and loaded its state, together in so long."""
    if source in RESTORES:
        learn(job, **{RESTORES[source]: max(1, passed_ns - job.expected.form_ns)})
    else:
        learn(job, form_ns=passed_ns)


def progressed(job: ClusterJob, fact: Progress, steps: int) -> None:
    """Steps were made: what snapshots and checkpoints took of them."""
    if steps <= 0:
        return
    expected = job.expected
    if fact.checkpoint_ns > 0 and expected.snapshot_steps:
        stall_ns = fact.checkpoint_ns // max(1, steps // expected.snapshot_steps)
        learn(job, snapshot_ns=stall_ns, checkpoint_ns=stall_ns)
    if fact.flush_ns:
        learn(job, flush_ns=fact.flush_ns)


def shared_step_ns(spec: JobSpec, replicas: int) -> int:
    """A step of so many replicas: they share a batch that stays.

    Where the number of micro-batches is known, the replica with the most of them decides.
    """
    expected, wanted = spec.expected, spec.gang.replicas
    if not replicas or replicas == wanted:
        return expected.step_ns
    parts = expected.micro_batches
    if parts:
        return expected.step_ns * -(-parts * wanted // replicas) // parts
    return expected.step_ns * wanted // replicas


def waiting_parts_ns(job: ClusterJob) -> tuple[int, int]:
    """(exposed communication, bubble) of a step; of a measured step, the shares of the plan."""
    expected = job.spec.expected
    if job.spec.plan is None or not job.step_ns:
        return expected.exposed_ns, expected.bubble_ns
    step_ns = expected.step_ns
    return (
        expected.exposed_ns * job.step_ns // step_ns,
        expected.bubble_ns * job.step_ns // step_ns,
    )


def expected_now(job: ClusterJob) -> tuple[Expected, dict[str, Origin]]:
    """Every expectation with where it is from, the measured step among them."""
    origins: dict[str, Origin] = dict.fromkeys(Expected.__struct_fields__, "default")
    if job.spec.plan is not None:
        origins.update(job.spec.plan.origins)
    origins.update(dict.fromkeys(job.measured, "measured"))
    expected = job.expected
    if job.step_ns:
        exposed_ns, bubble_ns = waiting_parts_ns(job)
        expected = structs.replace(
            expected, step_ns=job.step_ns, exposed_ns=exposed_ns, bubble_ns=bubble_ns
        )
        origins["step_ns"] = "measured"
    return expected, origins
