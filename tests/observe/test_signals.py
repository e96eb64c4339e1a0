"""A slow GPU, a slow host and a slow network card are told apart, by a device's events alone.

No trace of such a gang was recorded: these are generated. Every rank has a device with its own
clock, works, waits for peers and sends as one of a pipeline with replicas does, and its steps pass
through the timer, the records, the server's merging and the detectors that run in production.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from phalanx.cluster.jobs.job import GangShape
from phalanx.train.measure.timing import StepTimer
from phalanx.train.report.records import StepRecord
from tests.observe.records import step_record
from tests.observe.replay import replay
from tests.train.measure.fake_device import FakeDevice
from tests.train.measure.test_sends import FakeWork

SHAPE = GangShape(replicas=4, tensor=4, pipeline=2, slot_gpus=8)
WORLD = SHAPE.gpus(4)
CULPRIT, ONSET, WITHIN = 21, 20, 50
LOG_EVERY = 10  # steps between two transfers to the host
CHUNKS = 4  # of a step's work, with a collective after each
SENT_BYTES, SEND_SECONDS = 32 << 20, 0.002


class FakeRank:
    """One rank: what its host and its device do in a step."""

    def __init__(self, rank: int, generator: np.random.Generator) -> None:
        self.rank, self.generator = rank, generator
        self.device = FakeDevice(ahead=float(generator.uniform(0, 1e4)))
        self.timer = StepTimer(
            torch.device("cuda"), peer_waits=True, device_clock=self.device.clock()
        )
        self.gpu = self.host = self.network = 1.0  # how much longer it takes than it should
        self.begun: object = None
        self.records: list[StepRecord] = []

    def work(self, launching: float, computing: float) -> float:
        """Some of the step's work, up to a collective; when the device enters it."""
        noise = 1 + 0.01 * self.generator.standard_normal(2)
        with self.timer.phase("forward"):
            for _ in range(5):
                self.device.issue(launching * self.host * noise[0] / 5)
                self.device.kernel(computing * self.gpu * noise[1] / 5)
        self.begun = self.timer.wait_begins()
        return self.device.reaches()

    def leave(self, time: float) -> None:
        """The collective is over."""
        self.device.wait_until(time)
        self.timer.wait_ends(self.begun)

    def send(self) -> None:
        """Eight micro-batches to the next stage, which is ready for some of them."""
        assert self.timer._sends is not None
        for _ in range(8):
            late = max(0.0, float(self.generator.normal(0, 0.01)))
            noise = 1 + 0.02 * abs(float(self.generator.standard_normal()))
            took = SEND_SECONDS * self.network * noise + late
            self.timer._sends.sent(SENT_BYTES, 1, FakeWork(took))

    def end(self, step: int, ahead: float) -> None:
        """A host is at most so far ahead: at the end of a step it reads what its start reduced."""
        with self.timer.phase("device"):
            self.device.now = max(self.device.now, self.device.busy - ahead)
        self.timer.close_step()
        if step % LOG_EVERY == 0:
            first = step - LOG_EVERY + 1
            with self.timer.phase("device"):
                made = self.timer.drain()
            for number, time in enumerate(made, start=first):
                self.records.append(
                    step_record(
                        number,
                        self.rank,
                        step_seconds=time.seconds,
                        parts=time.parts,
                        sends=time.sends,
                    )
                )


@pytest.fixture(autouse=True)
def no_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: None)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: None)


def generated(
    part: str, factor: float, *, launching: float, computing: float, seed: int
) -> list[list[StepRecord]]:
    """Records of a gang in which one rank becomes slow; hosts and devices take so long a chunk."""
    generator = np.random.default_rng(seed)
    gang = [FakeRank(rank, generator) for rank in range(WORLD)]
    for step in range(1, ONSET + WITHIN + 1):
        if step == ONSET + 1 and part:
            setattr(gang[CULPRIT], part, factor)
        for _ in range(CHUNKS):
            wire = 0.001 * max(rank.network for rank in gang)
            left = max(rank.work(launching, computing) for rank in gang) + wire
            for rank in gang:
                rank.leave(left)
        for rank in gang:
            rank.send()
            rank.end(step, CHUNKS * computing)
    return [rank.records for rank in gang]


# What a chunk takes the host and the device: which of the two is usually the slower one.
DEVICE_BOUND = {"launching": 0.03, "computing": 0.1}
HOST_BOUND = {"launching": 0.1, "computing": 0.03}
NEARLY = {"launching": 0.095, "computing": 0.1}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("part", "factor", "load", "expected"),
    [
        ("gpu", 1.1, DEVICE_BOUND, "compute"),
        ("gpu", 1.1, NEARLY, "compute"),
        ("host", 1.1, HOST_BOUND, "host"),
        ("host", 1.3, NEARLY, "host"),
        ("host", 5.0, DEVICE_BOUND, "host"),
        ("network", 1.5, DEVICE_BOUND, "communication"),
        ("network", 3.0, HOST_BOUND, "communication"),
    ],
)
def test_what_of_a_rank_is_slow_is_named_within_fifty_steps_and_nobody_else(
    part: str, factor: float, load: dict[str, float], expected: str, seed: int
) -> None:
    ranks = generated(part, factor, **load, seed=seed)
    for summary in (False, True):  # rank by rank, and as nodes of large gangs tell it
        named = replay(ranks, SHAPE, summary=summary)
        assert [(each.rank, each.part) for each in named] == [(CULPRIT, expected)]
        assert ONSET < named[0].step <= ONSET + WITHIN


@pytest.mark.parametrize("load", [DEVICE_BOUND, NEARLY, HOST_BOUND])
def test_a_host_that_its_device_hides_and_a_healthy_gang_are_left_alone(
    load: dict[str, float],
) -> None:
    assert replay(generated("", 1.0, **load, seed=4), SHAPE) == []
    if load is DEVICE_BOUND:  # twice as slow, and still ahead of the device
        assert replay(generated("host", 2.0, **load, seed=4), SHAPE) == []


def test_a_slow_gpus_share_of_the_step_is_what_it_takes_longer() -> None:
    ranks = generated("gpu", 1.1, **DEVICE_BOUND, seed=5)
    (found,) = replay(ranks, SHAPE)
    assert found.slowdown_ppm == pytest.approx(100_000, rel=0.2)
