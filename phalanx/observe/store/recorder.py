"""Steps of gangs become rows of the metric store, with what is derived from them.

Derived: tokens a second and GPU beside the smallest world that the job ever had, and beside the
plan; joules, CO2 and dollars a million tokens, by the site's prices and (where GPUs tell it)
measured power.
"""

from __future__ import annotations

import statistics
import zlib
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct, field

from phalanx.cluster.policy import PricePolicy
from phalanx.observe.node.gpu_sample import GPU
from phalanx.observe.node.node_records import DETAIL_WORLD, PARTS, Floats
from phalanx.observe.node.node_sample import HOST, NodeSample
from phalanx.observe.store.gang_steps import GangStep
from phalanx.observe.store.metric_store import MetricStore
from phalanx.observe.store.tables import DAY_NS, Array, Column, MetricTable
from phalanx.observe.tracker.runs import known_scores, validation_summary
from phalanx.train.report.records import (
    EvaluationRecord,
    RareRecord,
    StepRecord,
    ValidationRecord,
)

MILLION = 1_000_000
MOST_NODE_GPUS = 1024
BASELINE_STEPS = 64  # of one world size, whose median stands for it

SCALARS = (
    "loss",
    "grad_norm",
    "learning_rate",
    "tokens_per_second",
    "tokens_seen",
    "mfu",
    "hfu",
    "step_seconds",
    *(f"{name}_seconds" for name in PARTS),
    "own_seconds_middle",
    "own_seconds_most",
    "peak_memory_bytes",
    "skipped",
    "damaged",
    "world_size",
    "generation",
    "tokens_per_second_per_gpu",
    "scaling_efficiency",
    "plan_efficiency",
    "joules_per_million_tokens",
    "co2_grams_per_million_tokens",
    "dollars_per_million_tokens",
    "eta_seconds",
)
# Numbers that are 0 in the records of a program that does not say them.
UNSAID = (
    *(
        "learning_rate",
        "tokens_per_second",
        "tokens_seen",
        "peak_memory_bytes",
        "skipped",
        "damaged",
    ),
    *(f"{name}_seconds" for name in PARTS),
)
# Not of every step: each in a table of its own, or the newest row of a step would hide the other.
VALIDATION, SCORES, CHECKPOINTS = "validation", "scores", "checkpoints"
JOB_TABLES = ("scalars", VALIDATION, SCORES, CHECKPOINTS)


class RecordedGang(Struct, kw_only=True):
    """What the recorder must know of a running gang."""

    job: int
    generation: int
    world: int
    gpus: int  # 0: a gang of CPUs
    planned_step_seconds: float = 0.0  # by the plan; 0: there is none
    node_names: Sequence[str] = ()
    slot_ranks: int = 1
    program: bool = False  # a user's own, which need not say every number
    watts: float = 0.0  # measured, of all its GPUs; 0: unknown
    per_gpu: dict[int, deque[float]] = field(default_factory=dict)  # tokens/s by world size


class Recorder:
    """Writes what gangs do into the store. One instance a leadership."""

    def __init__(self, store: MetricStore, price: PricePolicy) -> None:
        self.store, self.price = store, price
        self.gangs: dict[int, RecordedGang] = {}
        self.latest: dict[int, dict[str, float | int | None]] = {}  # by job: its newest row
        self._validated: dict[int, dict[str, float | int | None]] = {}  # by job: its newest loss
        self._remembered = store.owners("scalars")  # from before: the others need no look

    def begin(self, gang: RecordedGang) -> None:
        """A gang runs from now on."""
        before = self.gangs.get(gang.job)
        gang.per_gpu = before.per_gpu if before is not None else self._baselines(gang.job)
        self.gangs[gang.job] = gang

    def end(self, job: int) -> None:
        """Nothing more comes of a job."""
        self.gangs.pop(job, None)
        self.latest.pop(job, None)
        self._validated.pop(job, None)
        self.store.forget(owner_of(job))

    def step(self, step: GangStep) -> None:
        """A step was made."""
        gang = self.gangs.get(step.job)
        if gang is None or gang.generation != step.generation:
            return
        row, rank_row = self._row(gang, step), _rank_row(gang, step)
        if gang.program:
            row = {name: value for name, value in row.items() if value or name not in UNSAID}
            rank_row = {n: each for n, each in rank_row.items() if np.any(each) or n not in UNSAID}
        self._scalars(gang.job).append(step.time_ns, step.step, row)
        self._ranks(gang).append(step.time_ns, step.step, rank_row)
        shown = {name: value for name, value in row.items() if value == value}  # no NaN
        self.latest[gang.job] = {
            "step": step.step,
            "time": step.time_ns / 1e9,
            **shown,
            **self._validated.get(gang.job, {}),
        }

    def other(self, job: int, record: RareRecord, time_ns: int) -> None:
        """A validation, an evaluation, or a checkpoint."""
        if isinstance(record, EvaluationRecord):
            self._scores(job, record, time_ns)
            return
        if isinstance(record, ValidationRecord):
            summary = validation_summary(record.step, record.loss)
            self._validated[job] = summary
            if job in self.latest:
                self.latest[job] |= summary
            table_kind, name, value = VALIDATION, "validation_loss", _number(record.loss)
        elif not record.problem:
            table_kind, name, value = CHECKPOINTS, "checkpoint_seconds", record.seconds
        else:
            return
        table = self.store.table(owner_of(job), table_kind, 0, [Column(name)])
        table.append(time_ns, record.step, {name: value})

    def _scores(self, job: int, record: EvaluationRecord, time_ns: int) -> None:
        """One row of an evaluation; another set of scores has a table of its own."""
        scores = known_scores(record.scores)
        if scores:
            columns = [Column(name) for name in sorted(scores)]
            number = zlib.crc32("\n".join(sorted(scores)).encode())
            table = self.store.table(owner_of(job), SCORES, number, columns)
            table.append(time_ns, record.step, scores)

    def sample(self, sample: NodeSample, name: str, now_ns: int) -> None:
        """A look at a node's devices."""
        width = max((len(values) for values in sample.gpus.values()), default=0)
        if width > MOST_NODE_GPUS:
            return
        columns = [Column(each) for each in HOST]
        columns += [Column(each, width) for each in GPU] if width else []
        # A version that measures more begins a table of its own.
        table = self.store.table(f"node:{name}", f"devices{width}", len(columns), columns)
        row: dict[str, float | Array] = {n: v for n, v in sample.host.items() if n in HOST}
        row |= {n: np.asarray(v) for n, v in sample.gpus.items() if len(v) == width}
        table.append(min(sample.time_ns, now_ns), 0, row)

    def _scalars(self, job: int) -> MetricTable:
        columns = [Column(name) for name in SCALARS]
        return self.store.table(owner_of(job), "scalars", 0, columns)

    def _ranks(self, gang: RecordedGang) -> MetricTable:
        by_node = gang.world > DETAIL_WORLD
        names = list(gang.node_names)
        if by_node:
            columns = [Column(name, len(names)) for name in ("step_seconds", "own_seconds")]
            facts = {
                "rows": "node",
                "ranks": [slot * gang.slot_ranks for slot in range(len(names))],
                "nodes": names,
            }
        else:
            wide = ("step_seconds", "own_seconds", *(f"{name}_seconds" for name in PARTS))
            columns = [Column(name, gang.world) for name in wide]
            ranks = list(range(gang.world))
            nodes = [names[rank // gang.slot_ranks] if names else "" for rank in ranks]
            facts = {"rows": "rank", "ranks": ranks, "nodes": nodes}
        return self.store.table(owner_of(gang.job), "ranks", gang.generation, columns, facts)

    def _row(self, gang: RecordedGang, step: GangStep) -> dict[str, float]:
        head, seconds = step.head, _most(step.step_seconds)
        row = {
            "step_seconds": seconds,
            **{f"{name}_seconds": _mean(step.parts[i]) for i, name in enumerate(PARTS)},
            "own_seconds_middle": _middle(step.compute_seconds),
            "own_seconds_most": _most(step.compute_seconds),
            "peak_memory_bytes": float(step.memory_bytes),
            "world_size": float(gang.world),
            "generation": float(gang.generation),
        }
        if gang.planned_step_seconds and seconds > 0:
            row["plan_efficiency"] = gang.planned_step_seconds / seconds
        if head is not None:
            row |= _head_row(head)
            row |= self._derived(gang, head, seconds)
        return row

    def _derived(self, gang: RecordedGang, head: StepRecord, seconds: float) -> dict[str, float]:
        if not head.tokens or not seconds > 0:
            return {}
        per_gpu = head.tokens / seconds / gang.world
        earlier = gang.per_gpu.setdefault(gang.world, deque(maxlen=BASELINE_STEPS))
        earlier.append(per_gpu)
        metrics = {
            "tokens_per_second_per_gpu": per_gpu,
            # Medians of the last steps: one step beside a median would only show its noise.
            "scaling_efficiency": statistics.median(earlier)
            / statistics.median(gang.per_gpu[min(gang.per_gpu)]),
            "tokens_per_second": head.tokens / seconds,  # of the gang, not of rank 0's own clock
        }
        if gang.gpus:
            watts = gang.watts or float(gang.gpus * self.price.watts_per_gpu)
            joules = watts * seconds / head.tokens * MILLION
            hours = gang.gpus * seconds / 3600 / head.tokens * MILLION
            metrics |= {
                "joules_per_million_tokens": joules,
                "co2_grams_per_million_tokens": joules / 3.6e6 * self.price.grams_co2_per_kwh,
                "dollars_per_million_tokens": hours
                * self.price.micro_dollars_per_gpu_hour
                / MILLION,
            }
        return metrics

    def _baselines(self, job: int) -> dict[int, deque[float]]:
        """Speeds by world size that the store remembers, after a restart of the server."""
        baselines: dict[int, deque[float]] = {}
        if owner_of(job) not in self._remembered:
            return baselines
        for table in self.store.find(owner_of(job), "scalars"):
            _, last, rows = self.store.span(table, 1)
            if not rows:
                continue
            span = (last - 2 * DAY_NS, last)
            worlds = self.store.read(table, "world_size", 1, *span).values["mean"][:, 0]
            speeds = self.store.read(table, "tokens_per_second_per_gpu", 1, *span)
            for world, speed in zip(worlds, speeds.values["mean"][:, 0], strict=True):
                if world == world and speed == speed and world == int(world):
                    kept = baselines.setdefault(int(world), deque(maxlen=BASELINE_STEPS))
                    kept.append(float(speed))
        return baselines


def owner_of(job: int) -> str:
    """The name of a job's tables."""
    return f"job:{job}"


def _head_row(head: StepRecord) -> dict[str, float]:
    return {
        "loss": _number(head.loss),
        "grad_norm": _number(head.grad_norm),
        "learning_rate": head.learning_rate,
        "tokens_per_second": head.tokens_per_second,
        "tokens_seen": float(head.tokens_seen),
        "mfu": _number(head.mfu),
        "hfu": _number(head.hfu),
        "skipped": float(head.skipped),
        "damaged": float(head.damaged),
        "eta_seconds": _number(head.eta_seconds),
    }


def _rank_row(gang: RecordedGang, step: GangStep) -> Mapping[str, float | Array]:
    if gang.world <= DETAIL_WORLD:
        return {
            "step_seconds": step.step_seconds,
            "own_seconds": step.compute_seconds,
            **{f"{name}_seconds": step.parts[index] for index, name in enumerate(PARTS)},
        }
    nodes = len(gang.node_names)
    return {
        "step_seconds": _most_by_node(step.step_seconds, nodes),
        "own_seconds": _most_by_node(step.compute_seconds, nodes),
    }


def _most_by_node(values: Floats, nodes: int) -> Array:
    most: Array = np.fmax.reduce(values.reshape(nodes, -1), axis=1)
    return most


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def _known(values: Floats) -> Floats:
    return values[~np.isnan(values)]


def _mean(values: Floats) -> float:
    known = _known(values)
    return float(known.mean()) if len(known) else float("nan")


def _middle(values: Floats) -> float:
    known = _known(values)
    return float(np.median(known)) if len(known) else float("nan")


def _most(values: Floats) -> float:
    known = _known(values)
    return float(known.max()) if len(known) else float("nan")
