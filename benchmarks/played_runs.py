"""Many runs with curves, without their processes: what a team's server would have kept of them.

Submissions, ends and steps take the way of real ones: the core handles every event, and what nodes
would have said of steps is gathered and stored as theirs is.
"""

from __future__ import annotations

import math
import time
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.played_fleet import POLICY
from benchmarks.played_job import World
from phalanx.cluster.jobs.job import ClusterJob, Expected, GangShape, JobSpec
from phalanx.cluster.protocol.events import (
    GangJoined,
    GangReady,
    JobFinished,
    NodeSilent,
    Progress,
    Submit,
    Tick,
)
from phalanx.cluster.protocol.step_watch import StepWatch
from phalanx.cluster.protocol.timeouts import fixed_limits
from phalanx.control.server.agent_link.step_records import Metrics
from phalanx.control.server.history.run_history import first_look
from phalanx.control.server.policy_file import read_policy
from phalanx.control.wire.payload import TrainingWork, encode_payload
from phalanx.observe.node.node_messages import NodeRecords
from phalanx.observe.node.node_records import PARTS
from phalanx.observe.store.journal import open_journal
from phalanx.observe.store.metric_store import open_metrics
from phalanx.observe.store.recorder import Recorder
from phalanx.train.report.records import StepParts, StepRecord

GPUS, STEP_SECONDS, TOKENS = 8, 1.5, 1 << 20
RATES = (1e-4, 2e-4, 3e-4, 6e-4, 1e-3)
TEAMS = ("speech", "text", "vision")
PLAYED_JOB = '[model]\npreset = "tiny"\n[train]\nglobal_batch = 64\n'
ASKED_NS = 60 * 10**9  # until the core asks about nodes that it does not take out by itself
SPIKE = 0.4  # of the way: where every fifth run's loss is far above its curve for one step


def play_runs(
    state: Path, runs: int, steps: int, seed: int = 0, nodes: int = 0, silent: int = 0
) -> None:
    """Fills a server's state folder: all runs but the last two have ended.

    Of the last nodes, ``silent`` are not heard of at the end: of many, a person is asked.
    """
    state.mkdir(parents=True, exist_ok=True)
    (state / "policy.toml").write_text(POLICY.replace("nodes = 60", "nodes = 0"))
    began_ns = time.time_ns() - int(runs * (2 + steps * STEP_SECONDS) * 1e9)
    world = World(nodes or 4, began_ns, read_policy(state / "policy.toml"))
    store, journal = open_metrics(state / "metrics.sqlite"), open_journal(state / "runs.sqlite")
    watch, recorder = StepWatch(), Recorder(store, world.core.view.policy.price)
    metrics = Metrics(watch, lambda _: None, recorder)
    rng = np.random.default_rng(seed)
    for number in range(1, runs + 1):
        world.now_ns += 10**9
        job = _started(world, number)
        assert job.placement is not None, job.why
        limits = fixed_limits(10**12)
        watch.begin(job.id, job.generation, job.spec.gang, job.placement, limits, world.now_ns)
        _make_steps(world, metrics, job, steps, rng)
        run = first_look(job)
        if number <= runs - 2:
            generation = job.generation
            world.tell(JobFinished(job=job.id, generation=generation, step=steps))
            metrics.end(job.id)
            run.ended, run.state = world.now_ns / 1e9, "done"
            run.exit = {"reason": "done", "message": "all steps are made"}
        run.summary = {
            "step": steps,
            "loss": _loss(number, steps, steps),
            "tokens_per_second": TOKENS / STEP_SECONDS / 1.1,
            "mfu": 0.38 + number % 9 / 100,
        }
        run.tags = ["baseline"] if number % 5 == 0 else []
        run.provenance = {"seeds": {"data": number}, "project": {"commit": f"{number // 4:040x}"}}
        journal.put_run(job.id, msgspec.json.decode(msgspec.json.encode(run), type=type(run)))
    store.close()
    journal.close()
    for node in range(len(world.core.view.fleet) - silent, len(world.core.view.fleet)):
        world.tell(NodeSilent(node=node))
    if silent:
        world.now_ns += ASKED_NS
        world.tell(Tick())
    world.save(state)


def _started(world: World, number: int) -> ClusterJob:
    rate, team = RATES[number % len(RATES)], TEAMS[number % len(TEAMS)]
    toml = f'name = "run-{number}"\n' + PLAYED_JOB
    toml += f"[optimizer]\nlearning_rate = {rate}\n[schedule]\nwarmup_steps = {number % 3}\n"
    spec = JobSpec(
        name=f"run-{number}",
        user="ann" if number % 2 else "bob",
        team=team,
        gang=GangShape(replicas=GPUS, slot_gpus=GPUS),
        expected=Expected(steps=1000, step_ns=int(STEP_SECONDS * 1e9)),
        payload=encode_payload(TrainingWork(toml=toml, world_size=GPUS)),
    )
    world.tell(Submit(spec=spec))
    world.now_ns = world.core.next_deadline_ns() or world.now_ns
    world.tell(Tick())
    job = next(reversed(world.core.view.jobs.values()))
    world.tell(GangJoined(job=job.id, generation=job.generation, step=-1))
    world.tell(GangReady(job=job.id, generation=job.generation, step=0))
    return job


def _make_steps(
    world: World, metrics: Metrics, job: ClusterJob, steps: int, rng: np.random.Generator
) -> None:
    placement = job.placement
    assert placement is not None
    began_ns = world.now_ns
    metrics.begin(job, [world.core.view.fleet.nodes[node].name for node in placement.nodes])
    numbers = range(1, steps + 1)
    times = [began_ns + int(step * STEP_SECONDS * 1e9) for step in numbers]
    own = (STEP_SECONDS * (1 + 0.03 * rng.standard_normal((steps, GPUS)))).astype("<f4")
    message = NodeRecords(
        node=placement.nodes[0],
        job=job.id,
        generation=job.generation,
        ranks=tuple(range(GPUS)),
        steps=tuple(numbers),
        times_ns=tuple(times),
        step_seconds=np.full_like(own, STEP_SECONDS * 1.1).tobytes(),
        compute_seconds=own.tobytes(),
        parts=np.full((steps, len(PARTS), GPUS), np.nan, "<f4").tobytes(),
        head=tuple(_head(job, step, steps, rng) for step in numbers),
    )
    world.now_ns = times[-1]
    metrics.receive(message, world.now_ns)
    body = Progress(
        job=job.id,
        generation=job.generation,
        step=steps,
        committed=steps - 1,
        durable=0,
        at_ns=world.now_ns,
    )
    world.tell(body)


def _loss(number: int, step: int, steps: int) -> float:
    rate = RATES[number % len(RATES)]
    loss = 2 + number % 7 / 20 + 8 * math.exp(-step * (0.3 + 400 * rate) / steps * 6)
    return loss * 30 if number % 5 == 0 and step == int(SPIKE * steps) else loss


def _head(job: ClusterJob, step: int, steps: int, rng: np.random.Generator) -> StepRecord:
    seconds = STEP_SECONDS * 1.1
    return StepRecord(
        job=job.spec.name,
        generation=job.generation,
        rank=0,
        step=step,
        first_sample=step * 64,
        samples=64,
        tokens=TOKENS,
        tokens_seen=step * TOKENS,
        loss=_loss(job.id, step, steps) * (1 + 0.02 * float(rng.standard_normal())),
        grad_norm=0.4 + 2 * math.exp(-step / 20) + 0.1 * float(rng.random()),
        learning_rate=RATES[job.id % len(RATES)],
        step_seconds=seconds,
        parts=StepParts(data=0.01, forward=0.5, backward=1.0, optimizer=0.02, snapshot=0.03),
        tokens_per_second=TOKENS / seconds,
        mfu=0.38 + job.id % 9 / 100,
        hfu=0.4,
        mfu_basis="played",
        peak_memory_bytes=60 << 30,
        eta_seconds=None,
        skipped=False,
        non_finite=False,
    )
