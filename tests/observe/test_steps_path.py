"""Records on their way: worker, ring, agent, server."""

from __future__ import annotations

import math
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec import structs

from phalanx.cluster.jobs.job import ClusterJob, GangShape, JobSpec, Placement
from phalanx.cluster.protocol.commands import Form
from phalanx.cluster.protocol.events import LossSpike, Progress, SlowRank
from phalanx.cluster.protocol.step_watch import StepWatch
from phalanx.cluster.protocol.timeouts import fixed_limits
from phalanx.cluster.reasons import Reason
from phalanx.control.agent.jobs.keeper_watch import ward_ranks
from phalanx.control.server.agent_link.gang_watch import slowness
from phalanx.control.server.agent_link.step_records import Metrics
from phalanx.observe.node.node_messages import NodeRecords
from phalanx.observe.node.node_records import TimedRecord, merge, unpack
from phalanx.observe.node.ring import RingWriter
from phalanx.observe.node.worker_ring import RingRecords, RingSink, sensible
from phalanx.observe.store.gang_steps import GangSteps
from phalanx.train.report.records import SendTimes, StepParts, StepRecord
from tests.observe.records import SECOND_NS, said, step_record

NOW = 10_000 * SECOND_NS


def node_says(node: int, steps: range, **more: object) -> NodeRecords:
    """A node with two ranks tells of steps."""
    ranks = (2 * node, 2 * node + 1)
    found = merge(node, 1, 1, {r: [said(s, r, **more) for s in steps] for r in ranks})
    assert found is not None
    return found


def test_what_a_worker_records_comes_out_of_its_ring(tmp_path: Path) -> None:
    sink, ring = RingSink(tmp_path / "r"), RingRecords(tmp_path / "r")
    for step in (1, 2, 3):
        sink.write(step_record(step))
    sink.flush()
    got = ring.read(1, time.time_ns())
    assert [each.record for each in got] == [step_record(step) for step in (1, 2, 3)]
    assert got[2].time_ns - got[0].time_ns == 2 * SECOND_NS  # they ended one after the other
    assert got[2].time_ns <= time.time_ns()


def test_a_record_from_the_future_is_of_now(tmp_path: Path) -> None:
    RingWriter(tmp_path / "r").append(msgspec.msgpack.encode(said(1, time_ns=NOW * 5)))
    (got,) = RingRecords(tmp_path / "r").read(1, NOW)
    assert got.time_ns == NOW


def test_records_of_a_gang_that_is_over_are_left_out(tmp_path: Path) -> None:
    RingWriter(tmp_path / "r").append(msgspec.msgpack.encode(said(1, generation=1)))
    assert RingRecords(tmp_path / "r").read(2, NOW) == []


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_become_unknown(tmp_path: Path, loss: float) -> None:
    RingWriter(tmp_path / "r").append(msgspec.msgpack.encode(said(1, loss=loss, mfu=loss)))
    (got,) = RingRecords(tmp_path / "r").read(1, NOW)
    assert got.record.loss is None
    assert got.record.non_finite  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xff",
        b'{"kind": "step"',
        msgspec.msgpack.encode([1, {"kind": "step"}]),
        msgspec.msgpack.encode(said(1, step_seconds=math.nan)),
        msgspec.msgpack.encode(said(1, step_seconds=-1.0)),
        msgspec.msgpack.encode(said(1, step_seconds=1e30)),
        msgspec.msgpack.encode(said(-1)),
        msgspec.msgpack.encode(said(1, parts=StepParts(data=math.inf))),
        msgspec.msgpack.encode(said(1))[:-10],
    ],
)
def test_what_makes_no_sense_is_counted_and_left_out(tmp_path: Path, body: bytes) -> None:
    writer = RingWriter(tmp_path / "r")
    writer.append(body)
    writer.append(msgspec.msgpack.encode(said(2)))
    ring = RingRecords(tmp_path / "r")
    assert [each.record.step for each in ring.read(1, NOW)] == [2]
    assert ring.refused == 1


def test_a_flood_costs_no_more_than_the_ring_and_is_counted(tmp_path: Path) -> None:
    sink, ring = RingSink(tmp_path / "r"), RingRecords(tmp_path / "r")
    for step in range(1, 20_000):
        sink.write(step_record(step))
    sink.flush()
    assert ring.read(1, time.time_ns()) == []
    assert ring.lost_bytes > 1 << 20
    sink.write(step_record(20_000))
    sink.flush()
    assert [each.record.step for each in ring.read(1, time.time_ns())] == [20_000]


def test_a_message_survives_the_wire_rank_by_rank() -> None:
    slow = StepParts(own=1.5)
    ranks = {4: [said(1, 4)], 5: [said(1, 5, step_seconds=2.0, parts=slow)]}
    found = msgspec.msgpack.decode(msgspec.msgpack.encode(merge(2, 1, 1, ranks)), type=NodeRecords)
    matrices = unpack(found)
    assert matrices.step_seconds.tolist() == [[1.0, 2.0]]
    assert matrices.compute_seconds[0] == pytest.approx([0.5, 1.5])


def test_a_summary_keeps_the_worst_ranks_number_and_time() -> None:
    times = dict.fromkeys(range(8), 1.0) | {5: 3.0}
    ranks = {
        rank: [said(1, rank, step_seconds=t, parts=StepParts(own=t))] for rank, t in times.items()
    }
    found = merge(0, 1, 1, ranks, summary=True)
    assert found is not None
    assert found.worst == (5,)
    assert unpack(found).step_seconds.tolist() == [[times[rank] for rank in range(8)]]
    full = merge(0, 1, 1, ranks)
    assert full is not None
    assert len(found.parts) < len(full.parts)


@pytest.mark.parametrize(
    "change",
    [
        {"step_seconds": b"\0"},
        {"steps": (1, 2, 3, 4)},
        {"times_ns": ()},
        {"ranks": (0, 1, 2)},
        {"ranks": (7, 8)},
        {"summary": True},
    ],
)
def test_a_message_that_contradicts_itself_is_refused(change: dict[str, object]) -> None:
    gangs = GangSteps()
    gangs.begin(1, 1, [0], 2)
    message = structs.replace(node_says(0, range(1, 3)), **change)  # type: ignore[arg-type]
    assert gangs.receive(message, NOW).steps == []
    assert gangs.refused > 0
    assert [step.step for step in gangs.receive(node_says(0, range(1, 3)), NOW).steps] == [1, 2]


def test_a_step_is_given_out_when_every_node_has_told_of_it() -> None:
    gangs = GangSteps()
    gangs.begin(1, 1, [7, 8], 2)
    first = structs.replace(node_says(0, range(1, 4)), node=7)
    second = structs.replace(node_says(1, range(1, 3)), node=8)
    assert gangs.receive(first, NOW).steps == []
    whole = gangs.receive(second, NOW).steps
    assert [step.step for step in whole] == [1, 2]
    assert whole[0].step_seconds.tolist() == [1.0] * 4
    assert whole[0].head is not None and whole[0].head.loss == 4.0
    assert gangs.receive(second, NOW).steps == []  # said twice


def test_a_silent_node_does_not_hold_up_the_others_for_ever() -> None:
    gangs = GangSteps()
    gangs.begin(1, 1, [0, 1, 2], 2)
    gangs.receive(node_says(0, range(1, 100)), NOW)
    steps = gangs.receive(node_says(1, range(1, 100)), NOW).steps
    assert [step.step for step in steps] == list(range(1, 35))
    assert np.isnan(steps[0].step_seconds[4:]).all()
    later = gangs.receive(node_says(1, range(100, 101)), NOW + 20 * SECOND_NS).steps
    assert [step.step for step in later] == list(range(35, 100))


def test_one_node_that_claims_a_far_step_is_not_believed() -> None:
    gangs = GangSteps()
    gangs.begin(1, 1, [0, 1, 2], 2)
    for node in range(3):
        gangs.receive(node_says(node, range(1, 3)), NOW)
    gangs.receive(node_says(0, range(10**9, 10**9 + 2)), NOW)
    assert gangs.refused == 2
    got = [
        step for node in range(3) for step in gangs.receive(node_says(node, range(3, 5)), NOW).steps
    ]
    assert [step.step for step in got] == [3, 4]


def test_a_node_speaks_for_its_own_ranks_only() -> None:
    gangs = GangSteps()
    gangs.begin(1, 1, [0, 1], 2)
    foreign = structs.replace(node_says(1, range(1, 2)), node=0)
    gangs.receive(foreign, NOW)
    assert gangs.refused == 1
    assert gangs.gangs[1].open == {}


def watching(world: int) -> tuple[Metrics, list[object]]:
    """A gang of one rank a node."""
    watch, found = StepWatch(), list[object]()
    metrics = Metrics(watch, found.extend)
    shape = GangShape(slot_gpus=1)
    placement = Placement(nodes=tuple(range(world)), gpus=(1,) * world, replicas=world)
    watch.begin(1, 1, shape, placement, fixed_limits(60 * SECOND_NS), NOW)
    metrics.steps.begin(1, 1, placement.nodes, 1)
    return metrics, found


def tell(metrics: Metrics, node: int, each: TimedRecord) -> None:
    message = merge(node, 1, 1, {node: [each]})
    assert message is not None
    metrics.receive(message, NOW)


def test_a_rank_that_computes_slowly_becomes_an_event_within_twenty_steps() -> None:
    metrics, found = watching(8)
    generator = np.random.default_rng(1)
    for step in range(1, 21):
        for rank in range(8):
            own = 0.5 * (1.2 if rank == 5 else 1.0) * (1 + 0.02 * generator.standard_normal())
            parts = StepParts(peer_wait=0.7 - own, own=own)
            tell(metrics, rank, said(step, rank, step_seconds=0.7, parts=parts))
    slow = [event for event in found if isinstance(event, SlowRank)]
    assert [(event.rank, event.node, event.part) for event in slow] == [(5, 5, "compute")]
    assert slow[0].slowdown_ppm == pytest.approx(200_000, rel=0.3)


def test_sends_that_cannot_be_meant_are_left_out_and_the_step_is_kept() -> None:
    for size, seconds in ((0, 1.0), (-1, 1.0), (1 << 60, 1.0), (1, 1e3), (1, float("nan"))):
        record = step_record(1, sends=SendTimes(bytes=size, seconds=seconds))
        kept = sensible(record)
        assert isinstance(kept, StepRecord) and kept.sends is None
    meant = step_record(1, sends=SendTimes(bytes=1 << 20, seconds=0.01))
    assert sensible(meant) == meant


def test_what_a_slow_rank_costs_its_gang_goes_into_the_ledger() -> None:
    metrics, _ = watching(8)
    progress = Progress(job=1, generation=1, step=30, committed=0, durable=0, at_ns=0)
    for step in range(1, 31):
        for rank in range(8):
            own = 0.6 if rank == 5 else 0.5
            parts = StepParts(peer_wait=0.7 - own, own=own)
            tell(metrics, rank, said(step, rank, step_seconds=0.7, parts=parts))
    told = metrics.with_stragglers(progress)
    assert isinstance(told, Progress)
    steps = told.straggler_ns / 1e8  # a tenth of a second each, since it was found
    assert 10 <= steps <= 30
    assert metrics.with_stragglers(progress) == progress  # once


def uneven() -> tuple[Metrics, StepWatch, list[object]]:
    """Three ranks on nodes of two: the last node has one."""
    watch, found = StepWatch(), list[object]()
    metrics = Metrics(watch, found.extend)
    shape = GangShape(replicas=3, slot_gpus=2)
    placement = Placement(nodes=(0, 1), gpus=(), replicas=3)
    job = ClusterJob(id=1, spec=JobSpec(name="j", gang=shape), submitted_ns=0, generation=1)
    job.placement = placement
    watch.begin(1, 1, shape, placement, fixed_limits(60 * SECOND_NS), NOW)
    metrics.begin(job, ["a", "b"])
    return metrics, watch, found


def test_a_gang_that_does_not_fill_its_last_node_has_the_ranks_that_it_has() -> None:
    metrics, watch, found = uneven()
    assert metrics.steps.gangs[1].world == 3
    for step in range(1, 25):
        for node, ranks in ((0, (0, 1)), (1, (2,))):
            own = {rank: 0.6 if rank == 2 else 0.4 for rank in ranks}
            parts = {rank: StepParts(peer_wait=0.7 - own[rank], own=own[rank]) for rank in ranks}
            each = {r: [said(step, r, step_seconds=0.7, parts=parts[r])] for r in ranks}
            message = merge(node, 1, 1, each)
            assert message is not None
            metrics.receive(message, NOW)
    assert metrics.steps.refused == 0
    slow = [event for event in found if isinstance(event, SlowRank)]
    assert [(event.rank, event.node) for event in slow] == [(2, 1)]
    assert slowness(watch, 2) == [1.0, 1.5]
    claims = merge(1, 1, 1, {3: [said(30, 3)]})  # a rank that the gang does not have
    assert claims is not None
    metrics.receive(claims, NOW)
    assert metrics.steps.refused == 1


def test_a_node_keeps_as_many_snapshots_as_its_ward_has_ranks() -> None:
    form = Form(
        reason=Reason("x"),
        job=1,
        generation=1,
        nodes=(0, 1),
        gpus=(),
        slot_gpus=4,
        world=5,
        buddy_shift=1,
    )
    assert ward_ranks(form, 0) == 1 and ward_ranks(form, 1) == 4
    assert ward_ranks(structs.replace(form, spares=(2,)), 2) == 0
    assert ward_ranks(structs.replace(form, buddy_shift=0), 0) == 0


def test_ranks_that_only_flicker_are_not_called_slow() -> None:
    metrics, found = watching(4)
    generator = np.random.default_rng(2)
    for step in range(1, 200):
        for rank in range(4):
            own = 0.5 * (1 + 0.3 * abs(generator.standard_normal()))
            parts = StepParts(own=own)
            tell(metrics, rank, said(step, rank, step_seconds=1.5, parts=parts))
    assert [event for event in found if isinstance(event, SlowRank)] == []


def test_a_loss_that_is_no_number_becomes_an_event() -> None:
    metrics, found = watching(1)
    for step in range(1, 40):
        bad = {"loss": None, "non_finite": True} if step == 39 else {"loss": 2.0}
        tell(metrics, 0, said(step, 0, **bad))
    spikes = [event for event in found if isinstance(event, LossSpike)]
    assert [(event.step, event.not_finite) for event in spikes] == [(39, True)]


def test_a_program_that_reports_no_loss_has_no_spike_of_it() -> None:
    metrics, found = watching(1)
    for step in range(1, 40):
        tell(metrics, 0, said(step, 0, loss=None))
    assert [event for event in found if isinstance(event, LossSpike)] == []


def test_progress_and_late_records_of_the_same_steps_do_not_contradict() -> None:
    """A hang is judged by progress; records of earlier steps still come in."""
    metrics, _ = watching(1)
    watch = metrics._watch
    watch.alive(1, 1, 50, NOW + 50 * SECOND_NS)
    tell(metrics, 0, said(20, 0))
    assert watch.gangs[1].steps
    assert watch.due(NOW + 100 * SECOND_NS) == []
    (hung,) = watch.due(NOW + 111 * SECOND_NS)
    assert hung.step == 50  # type: ignore[union-attr]


def test_a_number_that_no_message_can_hold_costs_its_record_and_not_the_program(
    tmp_path: Path,
) -> None:
    sink, ring = RingSink(tmp_path / "r"), RingRecords(tmp_path / "r")
    sink.write(structs.replace(step_record(1), tokens=1 << 70))
    sink.write(structs.replace(step_record(2), step_seconds=math.inf))
    sink.write(step_record(3))
    sink.flush()
    assert [each.record.step for each in ring.read(1, time.time_ns())] == [3]
    assert (sink.refused, ring.refused) == (1, 1)


def test_a_loss_beyond_all_sense_is_judged_like_any_other() -> None:
    metrics, found = watching(1)
    for step in range(1, 140):
        tell(metrics, 0, said(step, 0, loss=1e300 if step == 139 else 2.0))
    assert [event.step for event in found if isinstance(event, LossSpike)] == [139]
