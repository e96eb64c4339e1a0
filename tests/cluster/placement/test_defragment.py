"""Defragmentation proposes moves that would work and that make whole nodes free."""

from __future__ import annotations

import random

from phalanx.cluster.jobs.job import ClusterJob, GangShape, JobSpec, Placement
from phalanx.cluster.placement.choose import place, request_of
from phalanx.cluster.placement.defragment import defragment
from phalanx.cluster.policy import Policy
from phalanx.cluster.queue.index import take
from phalanx.cluster.state import View
from tests.cluster.fleets import fleet_of


def start(view: View, gpus: int, avoid: tuple[int, ...] = ()) -> int:
    number = len(view.jobs) + 1
    shape = GangShape(replicas=gpus, slot_gpus=gpus)
    job = ClusterJob(id=number, spec=JobSpec(name="j", gang=shape), submitted_ns=0, state="running")
    asked = request_of(job)
    closed = sum(1 << node for node in avoid)
    found = place(view.fleet, type(asked)(job=number, shape=shape, replicas=gpus, closed=closed))
    assert isinstance(found, Placement)
    take(view, job, found)
    job.placement = found
    view.jobs[number] = job
    view.active[number] = None
    return number


def scattered(nodes: int, seed: int) -> View:
    rng = random.Random(seed)
    view = View(fleet_of(nodes), Policy())
    for _ in range(nodes):
        kept = rng.sample(range(nodes), nodes // 2)
        start(view, rng.choice([1, 2, 4]), tuple(kept))
    return view


def whole_nodes(view: View) -> int:
    return sum(not held for held in view.fleet.held)


def test_the_moves_can_be_made_and_free_whole_nodes() -> None:
    for seed in range(20):
        view = scattered(24, seed)
        before = whole_nodes(view)
        moves = defragment(view)
        for job, source, target in moves:
            held = view.fleet.release(job, source)
            free, taken = view.fleet.free_mask(target), 0
            for _ in range(held.gpus.bit_count()):
                taken |= free & -free
                free &= free - 1
            view.fleet.take(job, target, type(held)(taken, held.cpus, held.memory_bytes))
        assert not moves or whole_nodes(view) > before
        assert len({job for job, _, _ in moves}) == len(moves)


def test_two_halves_become_one_node() -> None:
    view = View(fleet_of(2), Policy())
    start(view, 4, (1,))
    start(view, 4, (0,))
    (move,) = defragment(view)
    assert {move[1], move[2]} == {0, 1}


def test_gangs_are_left_alone() -> None:
    view = View(fleet_of(3), Policy())
    job = ClusterJob(
        id=1,
        spec=JobSpec(name="g", gang=GangShape(replicas=8, slot_gpus=4)),
        submitted_ns=0,
        state="running",
    )
    found = place(view.fleet, request_of(job))
    assert isinstance(found, Placement)
    take(view, job, found)
    job.placement = found
    view.jobs[1] = job
    view.active[1] = None
    assert defragment(view) == ()


def test_a_nearly_empty_leaf_is_emptied() -> None:
    view = View(fleet_of(8), Policy())
    for node in (0, 1, 2):
        start(view, 4, tuple(n for n in range(8) if n != node))
    lonely = start(view, 2, tuple(n for n in range(8) if n != 5))
    assert any(job == lonely and target < 4 for job, _, target in defragment(view))
