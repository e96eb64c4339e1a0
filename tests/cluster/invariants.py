"""What must hold after every event, whatever happened."""

from __future__ import annotations

from phalanx.cluster.core import Core
from phalanx.cluster.node import NodeState


def check(core: Core) -> None:
    """Asserts every invariant of the core's state."""
    view, fleet = core.view, core.view.fleet
    held: dict[int, list[int]] = {}
    for node in range(len(fleet)):
        masks = [part.gpus for part in fleet.held[node].values()]
        taken = 0
        for mask in masks:
            assert taken & mask == 0, "a GPU in two gangs"
            taken |= mask
        full = (1 << fleet.nodes[node].gpus) - 1
        assert fleet.free_mask(node) == full & ~taken
        if fleet.state(node) in (NodeState.QUARANTINED, NodeState.SPARE):
            assert not fleet.held[node], f"node {node} is {fleet.state(node).name} and holds work"
        for job in fleet.held[node]:
            held.setdefault(job, []).append(node)
    spares = {job.id: job.placement.spares for job in view.jobs.values() if job.placement}
    for node in range(len(fleet)):
        owner = fleet.spare_for(node)
        if owner:
            assert fleet.state(node) is NodeState.SPARE and node in spares[owner]
    for number, job in view.jobs.items():
        check_job(core, number, held.get(number, []))
        assert (number in view.pending) == (job.state == "pending" and job.eligible)
        assert (number in view.active) == (job.placement is not None)
    core.ledger.check(view)
    check_dependencies(core)


def check_dependencies(core: Core) -> None:
    pairs: dict[str, int] = {}
    for job in core.view.jobs.values():
        if job.waiting_for and not job.ended:
            pairs[job.spec.user] = pairs.get(job.spec.user, 0) + len(job.waiting_for)
    assert core._ctx.awaited_of == pairs, "pairs of jobs that wait for each other"
    for number in core._ctx.after_kinds:
        assert core.view.jobs[number].waiting_for, "of a job that waits for nobody"


def check_job(core: Core, number: int, held: list[int]) -> None:
    job = core.view.jobs[number]
    shape = job.spec.gang
    if job.placement is None:
        assert not held, f"job {number} holds nodes without a place"
        assert job.gang is None
        assert job.state in ("pending", "done", "failed", "cancelled")
        return
    assert job.state in ("forming", "running", "draining")
    placement = job.placement
    assert sorted(held) == sorted(placement.nodes), "a gang holds exactly its nodes"
    assert len(placement.nodes) == shape.slots(placement.replicas), "all or nothing"
    assert shape.floor <= placement.replicas <= shape.ceiling
    assert not set(placement.spares) & set(placement.nodes)
    assert job.gang is not None
    assert job.committed <= job.step or job.gang.phase != "running"
    if placement.replicas < job.wanted_replicas or job.spec.spares:
        assert number in core._ctx.wanting, "whoever lacks nodes is known to"
    account = core.ledger.accounts[number]
    gpus = sum(core.view.fleet.held[node][number].gpus.bit_count() for node in placement.nodes)
    assert account.gpus == gpus
