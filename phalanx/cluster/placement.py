"""Where a gang goes: all of it, or nothing.

``place`` is pure: it reads the fleet and changes nothing. The order of the nodes it returns is the
order of ranks.
"""

from __future__ import annotations

from msgspec import Struct

from phalanx.cluster.constraints import Constraint, matches, parse
from phalanx.cluster.fleet import Fleet, Held, NodeState, lowest_bits
from phalanx.cluster.job import GangShape, Job, Placement
from phalanx.cluster.policy import SparePolicy
from phalanx.cluster.reasons import Reason, reason
from phalanx.cluster.state import View


class Request(Struct, frozen=True, kw_only=True):
    """A gang that wants a place."""

    job: int
    shape: GangShape
    replicas: int
    constraint: Constraint = ()
    partition: str = ""
    spares: int = 0
    avoid: tuple[int, ...] = ()  # nodes that it may not use
    keep: tuple[int, ...] = ()  # nodes it stands on already, in slot order, that it should keep


class Refusal(Struct, frozen=True):
    """Why there is no place. ``ever``: it could have one on this fleet if the fleet were empty."""

    reason: Reason
    ever: bool


def request_of(job: Job, replicas: int = 0) -> Request:
    """What a job asks for."""
    spec = job.spec
    return Request(
        job=job.id,
        shape=spec.gang,
        replicas=replicas or spec.gang.replicas,
        constraint=parse(spec.constraint),
        partition=spec.partition,
        spares=spec.spares,
    )


def place(fleet: Fleet, request: Request) -> Placement | Refusal:
    """A place for the whole gang on free GPUs of healthy nodes, or why there is none."""
    shape = request.shape
    wanted = shape.slots(request.replicas)
    found: list[int] = []
    masks: list[int] = []
    fitting = 0  # nodes that would do if they were free
    for node in range(len(fleet)):
        if not _suits(fleet, node, request):
            continue
        fitting += 1
        mask = _room(fleet, node, shape)
        if mask is None or fleet.state(node) is not NodeState.HEALTHY:
            continue
        found.append(node)
        masks.append(mask)
        if len(found) == wanted + request.spares:
            break
    if len(found) < wanted + request.spares:
        needed = wanted + request.spares
        why = reason("no_room", wanted=needed, free=len(found), fitting=fitting)
        return Refusal(why, ever=fitting >= needed)
    return Placement(
        nodes=tuple(found[:wanted]),
        gpus=tuple(masks[:wanted]),
        spares=tuple(found[wanted:]),
        replicas=request.replicas,
        reason=reason("first_fit", nodes=wanted),
    )


def held_by(fleet: Fleet, shape: GangShape, node: int, mask: int) -> Held:
    """What a slot on a node takes of it."""
    if shape.whole_nodes:
        spec = fleet.nodes[node]
        return Held((1 << spec.gpus) - 1, spec.cpus, spec.memory_bytes)
    return Held(mask, shape.slot_cpus, shape.slot_memory_bytes)


def spare_nodes(fleet: Fleet, policy: SparePolicy) -> tuple[int, ...]:
    """Nodes that the fleet's pool of spares should hold now, those it has included."""
    have = [node for node in range(len(fleet)) if fleet.state(node) is NodeState.SPARE]
    pool = [node for node in have if fleet.spare_for(node) == 0]
    for node in range(len(fleet) - 1, -1, -1):
        if len(pool) >= policy.nodes:
            break
        idle = fleet.free_mask(node) == (1 << fleet.nodes[node].gpus) - 1
        if idle and fleet.state(node) is NodeState.HEALTHY:
            pool.append(node)
    return tuple(pool[: max(0, policy.nodes)])


def replacement(fleet: Fleet, request: Request, slot: int) -> int | None:
    """The best node for one slot of a placed gang: the job's spare, the pool's, any free one."""
    for owner in (request.job, 0):
        for node in range(len(fleet)):
            free = fleet.state(node) is NodeState.SPARE and fleet.spare_for(node) == owner
            if free and _suits(fleet, node, request):
                return node
    for node in range(len(fleet)):
        free = fleet.state(node) is NodeState.HEALTHY and node not in request.keep
        if free and _suits(fleet, node, request) and _room(fleet, node, request.shape) is not None:
            return node
    return None


def defragment(view: View) -> tuple[tuple[int, int, int], ...]:
    """Moves (job, from node, to node) that would make whole nodes free; none are made."""
    return ()


def _suits(fleet: Fleet, node: int, request: Request) -> bool:
    spec, shape = fleet.nodes[node], request.shape
    known = fleet.classes[fleet.columns.node_class[node]]
    return (
        node not in request.avoid
        and (not request.partition or known.partition == request.partition)
        and matches(request.constraint, known.features)
        and spec.gpus >= shape.slot_gpus
        and spec.cpus >= shape.slot_cpus
        and spec.memory_bytes >= shape.slot_memory_bytes
    )


def _room(fleet: Fleet, node: int, shape: GangShape) -> int | None:
    free = fleet.free_mask(node)
    if shape.whole_nodes and fleet.held[node]:
        return None
    if free.bit_count() < shape.slot_gpus or fleet.free_cpus(node) < shape.slot_cpus:
        return None
    if fleet.free_memory(node) < shape.slot_memory_bytes:
        return None
    return lowest_bits(free, shape.slot_gpus)
