"""What a gang asks of placement, and the answer that there is no place."""

from __future__ import annotations

from msgspec import Struct

from phalanx.cluster.fleet.fleet import Fleet
from phalanx.cluster.jobs.job import ClusterJob, GangShape, JobSpec
from phalanx.cluster.node import Held
from phalanx.cluster.placement.constraints import Constraint, parse
from phalanx.cluster.placement.free_index import Nodes
from phalanx.cluster.policy import FabricPolicy, Partition, Policy, QueuePolicy
from phalanx.cluster.reasons import Reason


class PlacementRequest(Struct, frozen=True, kw_only=True):
    """A gang that wants a place."""

    job: int
    shape: GangShape
    replicas: int
    constraint: Constraint = ()
    partition: str = ""
    barred: tuple[str, ...] = ()  # partitions that it may not use
    spares: int = 0
    avoid: tuple[int, ...] = ()  # nodes that it may not use
    keep: tuple[int, ...] = ()  # nodes it stands on already, in slot order, that it should keep
    warm: tuple[int, ...] = ()  # spares of its own whose workers have started
    backup: int = -1  # a spare that keeps its newest steps in memory; -1: none does
    closed: Nodes = 0  # as ``avoid``: the set of nodes kept for others
    own: Nodes = 0  # spares of the job, which count as free
    holders: Nodes = 0  # nodes that keep its newest steps in memory: it had better go there
    fabric: FabricPolicy = FabricPolicy()


class PlacementRefusal(Struct, frozen=True):
    """Why there is no place."""

    reason: Reason


def request_of(
    job: ClusterJob, replicas: int = 0, policy: Policy | None = None
) -> PlacementRequest:
    """What a job asks for."""
    spec = job.spec
    return PlacementRequest(
        job=job.id,
        shape=spec.gang,
        replicas=replicas or job.wanted_replicas,
        constraint=parse(spec.constraint),
        partition=spec.partition,
        barred=barred_from(policy.queue, spec) if policy else (),
        spares=spec.spares,
        fabric=policy.fabric if policy else FabricPolicy(),
    )


def barred_from(policy: QueuePolicy, spec: JobSpec) -> tuple[str, ...]:
    """Partitions whose rules keep a job out; of one that names its own, only that may be."""
    if spec.partition:
        own = policy.partitions.get(spec.partition)
        return () if own is None or may_use(own, spec) else (spec.partition,)
    return tuple(name for name, rule in policy.partitions.items() if not may_use(rule, spec))


def may_use(rule: Partition, spec: JobSpec) -> bool:
    """Whether the rules of a partition let a job in."""
    in_time = not rule.most_time_ns or 0 < spec.time_limit_ns <= rule.most_time_ns
    return in_time and (not rule.teams or spec.team in rule.teams)


def held_by(fleet: Fleet, shape: GangShape, node: int, mask: int) -> Held:
    """What a slot on a node takes of it."""
    if shape.whole_nodes:
        spec = fleet.nodes[node]
        return Held((1 << spec.gpus) - 1, spec.cpus, spec.memory_bytes)
    return Held(mask, shape.slot_cpus, shape.slot_memory_bytes)


def tensor_slots(shape: GangShape) -> int:
    """Slots that must share an NVLink domain, because a tensor group lies across them.

    0: the group straddles slots unevenly, which no placement can mend.
    """
    if shape.slot_gpus == 0 or shape.slot_gpus % shape.tensor == 0:
        return 1
    if shape.tensor % shape.slot_gpus == 0:
        return shape.tensor // shape.slot_gpus
    return 0


def gpus_of(fleet: Fleet, job: ClusterJob, replicas: int = 0) -> int:
    """GPUs that a job will hold, spares included."""
    shape = job.spec.gang
    node = max((known.gpus for known in fleet.classes), default=shape.slot_gpus)
    each = node if shape.whole_nodes else shape.slot_gpus
    return shape.slots(replicas or job.wanted_replicas) * each + job.spec.spares * node
