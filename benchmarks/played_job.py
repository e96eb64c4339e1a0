"""One job on a whole fleet, in which a rank becomes slow: what its nodes would have told.

The messages are those of agents, and take the way of agents' messages: gathered into steps,
judged by the detectors, stored. What the detectors say goes through the core into the log.
"""

from __future__ import annotations

import math
import time
from pathlib import Path

import numpy as np
from msgspec import Struct

from benchmarks.cluster_load import fleet_of
from benchmarks.played_fleet import POLICY
from phalanx import __version__
from phalanx.cluster.core import Core
from phalanx.cluster.jobs.job import ClusterJob, Expected, GangShape, JobSpec
from phalanx.cluster.policy import Policy
from phalanx.cluster.protocol.events import (
    Event,
    EventBody,
    GangJoined,
    GangReady,
    Progress,
    SlowRank,
    Submit,
    Tick,
)
from phalanx.cluster.protocol.step_watch import StepWatch
from phalanx.cluster.protocol.timeouts import fixed_limits
from phalanx.control.server.agent_link.step_records import Metrics
from phalanx.control.server.policy_file import read_policy
from phalanx.control.server.shell_memory import ShellMemory
from phalanx.control.server.store.interface import StoredSnapshot, command_row, event_row
from phalanx.control.server.store.sqlite import SqliteStore
from phalanx.observe.node.node_messages import NodeRecords
from phalanx.observe.node.node_records import PARTS, Floats
from phalanx.observe.store.metric_store import open_metrics
from phalanx.observe.store.recorder import Recorder
from phalanx.train.report.records import StepParts, StepRecord

GPUS = 8
STEP_SECONDS, NOISE = 2.0, 0.015
BATCH = 8  # steps in one message


class Slowed(Struct, frozen=True, kw_only=True):
    """Which rank was slow, from which step on, and the step at which it was named."""

    rank: int
    node: str
    since: int
    named_at: int  # 0: never


class World:
    """The core with its log, fed with the times of the played steps."""

    def __init__(self, nodes: int, now_ns: int, policy: Policy) -> None:
        self.core = Core(fleet_of(nodes), policy, now_ns=now_ns)
        self.memory = ShellMemory()
        self.now_ns = now_ns
        self.rows: list[tuple[int, int, bytes]] = []
        self.given: list[tuple[int, bytes]] = []

    def tell(self, body: EventBody) -> None:
        """One more event."""
        event = Event(self.core.sequence + 1, self.now_ns, body)
        commands = self.core.handle(event)
        self.memory.note(event, commands)
        self.rows.append(event_row(event))
        if commands:
            self.given.append(command_row(event.sequence, commands))

    def start(self, nodes: int) -> ClusterJob:
        """A job on every node, running."""
        gang = GangShape(replicas=nodes, tensor=GPUS, slot_gpus=GPUS)
        expected = Expected(steps=100_000, step_ns=int(STEP_SECONDS * 1e9))
        self.tell(Submit(spec=JobSpec(name="dense-1t", gang=gang, expected=expected)))
        self.now_ns = self.core.next_deadline_ns() or self.now_ns
        self.tell(Tick())
        job = self.core.view.jobs[1]
        self.tell(GangJoined(job=1, generation=job.generation, step=-1))
        self.tell(GangReady(job=1, generation=job.generation, step=0))
        assert job.state == "running", job.why
        return job

    def save(self, state: Path) -> None:
        """As a server would have left it."""
        store = SqliteStore(state / "log.sqlite")
        store.lead("http://127.0.0.1:0", __version__)
        store.append(self.rows, self.given)
        core, answers = self.core.snapshot(), self.memory.dump()
        sequence = self.core.sequence
        store.save_snapshot(
            StoredSnapshot(sequence=sequence, version=__version__, core=core, answers=answers)
        )
        store.close()


def play_slow_rank(
    state: Path, nodes: int, steps: int, since: int, slower: float = 0.2, seed: int = 0
) -> Slowed:
    """Fills a server's state folder with a job of which one rank is slower from a step on."""
    state.mkdir(parents=True, exist_ok=True)
    (state / "policy.toml").write_text(POLICY.replace("nodes = 60", "nodes = 0"))
    began_ns = time.time_ns() - int(steps * STEP_SECONDS * 1e9)
    world = World(nodes, began_ns, read_policy(state / "policy.toml"))
    job = world.start(nodes)
    rng = np.random.default_rng(seed)
    rank = int(nodes * GPUS * 0.62)
    placement = job.placement
    assert placement is not None
    watch, said = StepWatch(), list[EventBody]()
    watch.begin(job.id, job.generation, job.spec.gang, placement, fixed_limits(10**12), began_ns)
    store = open_metrics(state / "metrics.sqlite")
    recorder = Recorder(store, world.core.view.policy.price)
    metrics = Metrics(watch, said.extend, recorder)
    names = [world.core.view.fleet.nodes[node].name for node in placement.nodes]
    metrics.begin(job, names)
    named_at = 0
    for first in range(1, steps + 1, BATCH):
        numbers = range(first, min(first + BATCH, steps + 1))
        world.now_ns = began_ns + int(numbers[-1] * STEP_SECONDS * 1e9)
        times = STEP_SECONDS * (1 + NOISE * rng.standard_normal((len(numbers), nodes * GPUS)))
        for row, step in enumerate(numbers):
            times[row, rank] *= 1 + slower * (step >= since)
        for slot, node in enumerate(placement.nodes):
            own = times[:, slot * GPUS : (slot + 1) * GPUS].astype(np.float32)
            metrics.receive(_message(job, node, slot, numbers, own, began_ns), world.now_ns)
        world.tell(_progress(job, numbers, world.now_ns))
        while said:
            body = said.pop(0)
            world.tell(body)
            if isinstance(body, SlowRank) and body.rank == rank and not named_at:
                named_at = numbers[-1]
    store.close()
    world.save(state)
    return Slowed(rank=rank, node=names[rank // GPUS], since=since, named_at=named_at)


def _progress(job: ClusterJob, steps: range, now_ns: int) -> Progress:
    """What the gang's coordinator says of its steps."""
    return Progress(
        job=job.id,
        generation=job.generation,
        step=steps[-1],
        committed=steps[-1] - 1,
        durable=0,
        at_ns=now_ns,
    )


def _message(
    job: ClusterJob,
    node: int,
    slot: int,
    steps: range,
    own: Floats,
    began_ns: int,
) -> NodeRecords:
    """What an agent says of a large gang: the middle and the worst of its ranks."""
    worst = own.argmax(axis=1)
    pair = np.stack([np.median(own, axis=1), own.max(axis=1)], axis=1)
    parts = np.full((len(steps), len(PARTS), 2), np.nan, np.float32)
    return NodeRecords(
        node=node,
        job=job.id,
        generation=job.generation,
        ranks=tuple(range(slot * GPUS, (slot + 1) * GPUS)),
        steps=tuple(steps),
        times_ns=tuple(began_ns + int(step * STEP_SECONDS * 1e9) for step in steps),
        step_seconds=np.full_like(pair, STEP_SECONDS * 1.2).astype("<f4").tobytes(),
        compute_seconds=pair.astype("<f4").tobytes(),
        parts=parts.astype("<f4").tobytes(),
        summary=True,
        worst=tuple(int(slot * GPUS + each) for each in worst),
        head=tuple(_head(job, step) for step in steps) if slot == 0 else (),
    )


def _head(job: ClusterJob, step: int) -> StepRecord:
    """What rank 0 says of a step."""
    seconds, tokens = STEP_SECONDS * 1.2, 16 << 20
    return StepRecord(
        job=job.spec.name,
        generation=job.generation,
        rank=0,
        step=step,
        first_sample=step * 2048,
        samples=2048,
        tokens=tokens,
        tokens_seen=step * tokens,
        loss=2.1 + 9 * math.exp(-step / 12),
        grad_norm=0.4 + 2 * math.exp(-step / 9),
        learning_rate=1e-4,
        step_seconds=seconds,
        parts=StepParts(data=0.01, forward=0.6, backward=1.2, optimizer=0.02, snapshot=0.03),
        tokens_per_second=tokens / seconds,
        mfu=0.41,
        hfu=0.41,
        mfu_basis="played",
        peak_memory_bytes=60 << 30,
        eta_seconds=None,
        skipped=False,
        non_finite=False,
    )
