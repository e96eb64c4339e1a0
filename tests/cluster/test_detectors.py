from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from phalanx.cluster.detectors import (
    behind,
    loss_spike,
    regression,
    score,
    slow_compute,
    slow_host,
    slow_transfer,
    starved,
    told_wrong,
    vote,
)
from phalanx.cluster.detectors.trends import gradient_explosion
from phalanx.cluster.jobs.job import GangShape, Placement
from phalanx.cluster.protocol.events import NoProgress, SlowRank
from phalanx.cluster.protocol.step_watch import GangRecord, StepWatch
from phalanx.cluster.protocol.timeouts import fixed_limits

MS = 1_000_000


class Noise:
    """Times of many ranks: jitter, a fixed difference between devices, and stray hiccups."""

    def __init__(self, ranks: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.base = 400 * MS * (1 + 0.004 * self.rng.standard_normal(ranks))

    def step(self) -> np.ndarray:
        times = self.base * (1 + 0.01 * self.rng.standard_normal(len(self.base)))
        hiccups = self.rng.random(len(times)) < 1e-3
        times[hiccups] *= 1 + 3 * self.rng.random(int(hiccups.sum()))
        return times.astype(np.int64)


def watch_of(shape: GangShape) -> StepWatch:
    watch = StepWatch()
    nodes = tuple(range(shape.slots(shape.replicas)))
    placement = Placement(nodes, (), replicas=shape.replicas)
    watch.begin(1, 1, shape, placement, fixed_limits(60_000 * MS), 0)
    return watch


@pytest.mark.parametrize("part", ["compute", "communication"])
def test_one_slow_rank_among_many_is_found_within_20_steps(part):
    shape = GangShape(replicas=78, tensor=8, pipeline=16, slot_gpus=8)
    ranks, culprit, onset = shape.gpus(78), 5_432, 30
    watch, compute, transfer = watch_of(shape), Noise(ranks, 1), Noise(ranks, 2)
    found = {}
    for step in range(1, onset + 21):
        times = {"compute": compute.step(), "communication": transfer.step()}
        if step > onset:
            times[part][culprit] = times[part][culprit] * 112 // 100
        record = GangRecord(
            job=1,
            generation=1,
            step=step,
            step_ns=500 * MS,
            compute_ns=times["compute"],
            transfer_ns=times["communication"],
        )
        for event in watch.record(record, step * 500 * MS):
            found[step] = event
    assert len(found) == 1
    (step, event), *_ = found.items()
    assert onset < step <= onset + 20
    assert isinstance(event, SlowRank)
    assert (event.rank, event.node, event.part) == (culprit, culprit // 8, part)
    assert 80_000 < event.slowdown_ppm < 150_000


def test_a_rank_that_becomes_slower_still_is_named_again():
    """What was done about it was right for what it cost then."""
    watch, noise = watch_of(GangShape(replicas=4, slot_gpus=1)), Noise(4, 5)
    told = []
    for step in range(1, 150):
        times = noise.step()
        if step > 4:
            times[2] = times[2] * (13 if step <= 8 else 40) // 10
        record = GangRecord(job=1, generation=1, step=step, step_ns=MS, compute_ns=times)
        told += [(step, event.rank, event.slowdown_ppm) for event in watch.record(record, step)]
    (first, *who), (second, *again) = told
    assert who[0] == again[0] == 2 and again[1] > 1.5 * who[1]
    assert first == 12 and second == 16


def test_stages_of_a_pipeline_are_compared_among_themselves():
    shape = GangShape(replicas=16, tensor=8, pipeline=2, slot_gpus=8)
    watch, noise = watch_of(shape), Noise(shape.gpus(16), 3)
    for step in range(1, 40):
        times = noise.step()
        times[: len(times) // 2] = times[: len(times) // 2] * 130 // 100  # the heavier stage
        record = GangRecord(job=1, generation=1, step=step, step_ns=MS, compute_ns=times)
        assert watch.record(record, step) == []


def test_clean_noise_raises_no_alarm():
    noise = Noise(10_000, 4)
    window = [noise.step() for _ in range(12)]
    for _ in range(150):
        window = [*window[4:], *(noise.step() for _ in range(4))]
        stacked = np.stack(window)
        assert slow_compute(stacked) == []
        assert slow_transfer(stacked) == []


def test_ranks_of_a_machine_with_far_too_few_cores_are_not_accused():
    """Own times of four healthy ranks, of 136 steps on two cores that five others used too."""
    recorded = Path(__file__).parent / "recorded" / "own_under_load.json"
    times = np.asarray(json.loads(recorded.read_text()), np.int64) * 1000
    windows = [times[end - 12 : end] for end in range(12, len(times) + 1, 4)]
    assert [slow_compute(window) for window in windows] == [[]] * len(windows)
    slowed = [window * np.asarray([100, 100, 200, 100]) // 100 for window in windows]
    named = [[slow.rank for slow in slow_compute(window)] for window in slowed]
    assert named.count([2]) > 0.9 * len(named)


def test_a_rank_that_takes_longer_at_its_hosts_pace_has_no_slow_device():
    noise = Noise(64, 9)
    compute = np.stack([noise.step() for _ in range(12)])
    compute[:, 40] = compute[:, 40] * 112 // 100
    paced = np.zeros_like(compute)
    assert [slow.rank for slow in slow_compute(compute, host_ns=paced)] == [40]
    paced[:, 40] = 30 * MS  # most of the 48 ms that it takes longer
    assert slow_compute(compute, host_ns=paced) == []
    paced[:, 32:] = 30 * MS  # as much as its stage: not what is wrong with it
    assert [s.rank for s in slow_compute(compute, np.arange(64) // 32, paced)] == [40]


def test_a_slow_host_is_named_where_its_device_waits_for_it():
    noise = Noise(64, 11)
    launch = np.stack([noise.step() for _ in range(12)])
    launch[:, 40] = launch[:, 40] * 150 // 100
    paced, own = np.zeros_like(launch), np.full_like(launch, 500 * MS)
    assert slow_host(launch, paced, own) == []  # it is ahead of its device all the same
    paced[:, 40] = 120 * MS
    assert slow_host(launch, paced, own) == []  # nor does the rank take longer
    own[:, 40] = 600 * MS
    (found,) = slow_host(launch, paced, own)
    assert (found.rank, found.part, found.slowdown_ppm) == (40, "host", 200_000)
    own[:, 40] = 1200 * MS  # for another reason besides
    (found,) = slow_host(launch, paced, own)
    assert found.slowdown_ppm == 240_000
    paced[:, 7], own[:, 7] = 400 * MS, 900 * MS  # by chance the last one of hosts that are alike
    assert [slow.rank for slow in slow_host(launch, paced, own)] == [40]


def test_a_device_with_more_to_do_is_no_slow_host_though_that_launches_more():
    # As four processes on an H200 measured it: one had 40 % more kernels than the others.
    own = np.tile(np.array([207, 206, 207, 227]) * MS, (12, 1))
    paced = np.tile(np.array([2500, 2300, 2500, 3900]) * MS // 1000, (12, 1))
    launch = np.tile(np.array([4000, 4010, 3990, 5600]) * MS // 1000, (12, 1))
    assert [slow.rank for slow in slow_compute(own, host_ns=paced)] == [3]
    assert slow_host(launch, paced, own) == []


def test_stages_that_send_over_other_links_are_compared_among_themselves():
    noise = Noise(64, 10)
    times = np.stack([noise.step() for _ in range(12)])
    times[:, :20] *= 9  # between nodes; the others stay within one
    stages = (np.arange(64) >= 20).astype(np.int64)
    assert slow_transfer(times) != []
    assert slow_transfer(times, stages) == []
    times[:, 7] = times[:, 7] * 130 // 100
    assert [slow.rank for slow in slow_transfer(times, stages)] == [7]


def test_one_slow_step_is_no_slow_rank():
    noise = Noise(1000, 5)
    window = np.stack([noise.step() for _ in range(12)])
    window[3, 77] *= 50
    assert slow_compute(window) == []


def test_few_restless_ranks_that_agree_by_chance_accuse_nobody():
    # Three ranks with one middle, a fourth a little above: only how much each varies from step to
    # step tells that this is chance.
    swing = np.array([-30, 30, -20, 20, -10, 10, 0, -30, 30, -20, 20]) * 1_000_000
    restless = np.stack([100_000_000 + swing + extra for extra in (0, 1000, 2000, 8_000_000)], 1)
    assert slow_compute(restless) == []
    calm = np.stack([100_000_000 + swing // 100 + extra for extra in (0, 0, 0, 8_000_000)], 1)
    assert [slow.rank for slow in slow_compute(calm)] == [3]


def test_a_slow_card_does_not_accuse_the_neighbours_that_send_to_it():
    noise = Noise(1000, 6)
    window = np.stack([noise.step() for _ in range(12)])
    window[:, 500] *= 3
    window[:, 499] = window[:, 499] * 15 // 10
    assert [slow.rank for slow in slow_transfer(window)] == [500]


def test_steps_that_became_slower_are_a_regression_and_noise_is_not():
    rng = np.random.default_rng(7)
    steps = [int(MS * (1 + 0.01 * rng.standard_normal())) for _ in range(100)]
    assert regression(steps) is None
    slower = regression([*steps, *(step * 11 // 10 for step in steps[:20])])
    assert slower is not None
    assert 80_000 < slower < 120_000


def test_waiting_for_data_is_starvation_above_a_tenth():
    assert starved(5, 100) is None
    assert starved(25, 100) == 250_000


def test_a_loss_that_jumps_is_a_spike_and_one_that_falls_is_not():
    rng = np.random.default_rng(8)
    losses: list[float | None] = [
        3 - step / 100 + 0.02 * rng.standard_normal() for step in range(60)
    ]
    assert all(loss_spike(losses[:end]) is None for end in range(1, 61))
    assert loss_spike([*losses, 4.5]) is not None
    assert loss_spike([*losses, None]) is not None
    assert loss_spike([*losses, math.nan]) == loss_spike([*losses, None])
    assert loss_spike([*losses, math.nan, 4.5]) == loss_spike([*losses, None, 4.5])


def test_whoever_is_behind_in_the_collectives_holds_up_a_gang():
    assert behind([7, 7, 6, 7, 7, 7, 7, 7, 7, 7]) == [2]
    assert behind([7] * 10) == []
    assert behind([6] * 5 + [7] * 5) == []  # half of them: nobody in particular


def test_a_gang_without_steps_is_reported_with_who_is_behind():
    shape = GangShape(replicas=2, tensor=8, slot_gpus=8)
    watch = watch_of(shape)
    for rank in range(16):
        watch.entered(1, rank, 41 if rank == 11 else 42)
    assert watch.due(watch.next_deadline_ns() - 1) == []
    (event,) = watch.due(watch.next_deadline_ns())
    assert isinstance(event, NoProgress)
    assert (event.step, event.nodes, event.limit) == (0, (1,), "first_step")


def test_the_deadline_of_a_hang_follows_the_steps_that_were_measured():
    watch = StepWatch()
    placement = Placement((0, 1), (), replicas=2)
    shape = GangShape(replicas=2, slot_gpus=1)
    watch.begin(
        1, 1, shape, placement, lambda step_ns: fixed_limits(5 * (step_ns or 10_000 * MS))(0), 0
    )
    assert watch.next_deadline_ns() == 50_000 * MS
    for step in range(1, 9):
        step_ns = 100 * MS if step != 7 else 9_000 * MS  # one hiccup does not count
        watch.record(GangRecord(job=1, generation=1, step=step, step_ns=step_ns), step * 100 * MS)
    assert watch.next_deadline_ns() == 800 * MS + 500 * MS


def test_a_bit_flip_is_localised_by_vote():
    shards = {0: [(0, 5), (8, 5), (16, 5)], 1: [(1, 9), (9, 8), (17, 9)]}
    assert vote(shards).wrong == (9,)
    assert vote({0: [(0, 5), (8, 5)]}).clean


def test_two_replicas_that_differ_need_a_replay():
    verdict = vote({0: [(0, 5), (8, 6)]})
    assert verdict.wrong == () and verdict.undecided == (0, 8)


@pytest.mark.parametrize(
    ("claims", "wrong"),
    [
        ([(1, 5), (2, 6)], ()),  # word against word
        ([(1, 5), (2, 6), (1, 5), (2, 5)], (2,)),  # by chance, the first time
        ([(1, 5), (2, 6), (1, 6), (2, 6)], (1,)),
        ([(1, 5), (2, 6), (1, 5), (2, 6)], ()),  # each insists
        ([(1, 5), (2, 6), (1, 5), (2, 7)], (2,)),  # one of them contradicts itself
        ([(1, 5), (2, 6), (1, 5), (2, 6), (1, 5), (3, 5)], (2,)),  # a third one decides
        ([(1, 5), (2, 6), (1, 5), (2, 6), (1, 5), (3, 6)], (1,)),
        ([(1, 5), (2, 6), (1, 5), (2, 6), (1, 5), (3, 7)], ()),  # and knows no better
        ([(1, 5), (2, 6), (1, 7), (2, 7)], ()),  # the step is not deterministic
        ([(1, 5), (2, 6), (1, 7), (2, 8), (1, 9), (3, 9)], ()),
        ([(1, 5), (2, 5), (3, 6), (4, 6), (1, 5), (2, 5), (3, 5), (4, 5)], (3, 4)),
        ([], ()),
    ],
)
def test_all_that_was_said_of_a_step_names_who_was_wrong(claims, wrong):
    assert told_wrong(claims) == wrong


def test_incidents_fade():
    day = 86_400
    assert score([0, 0], day) == 2000
    assert score([day], day) == 500
    assert score([day // 2], day) == 750
    assert score([100 * day], day) == 0


@pytest.mark.parametrize("value", [1e300, -1e300, 9.3e12, 1e18])
def test_numbers_beyond_all_sense_break_no_detector(value):
    usual = [2.0 + 0.01 * (i % 3) for i in range(200)]
    assert (loss_spike([*usual, value]) is not None) == (value > 0)
    assert loss_spike([*[abs(value)] * 200, 2.0]) is None
    found = gradient_explosion([*usual, abs(value)])
    assert found is not None and 0 < found <= 10**15
    assert gradient_explosion([abs(value)] * 200) is None
