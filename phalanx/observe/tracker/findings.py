"""Findings as people see them: what, where, the evidence in numbers, a picture, what to do.

The detectors are the cluster's; their findings come as events of the log. Those that change no
decision of the core (memory that creeps, gradients that grow, slow saves, behind the plan) are
asked here, of the same pure functions.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from msgspec import Struct, field

from phalanx.cluster.causes import Cause
from phalanx.cluster.detectors import SlowPart
from phalanx.cluster.detectors.trends import (
    below_plan,
    gradient_explosion,
    memory_creep,
    slow_saves,
)
from phalanx.cluster.protocol.commands import job_of
from phalanx.cluster.protocol.events import (
    Corruption,
    DataStarved,
    EventBody,
    LossSpike,
    NodeSilent,
    NoProgress,
    SlowRank,
    StorageSlow,
    ThroughputRegression,
)
from phalanx.cluster.protocol.messages import DeviceError, WorkerExited

MILLION = 1_000_000
SLOW_PARTS: dict[SlowPart, str] = {
    "compute": "its own compute",
    "communication": "its own communication",
    "host": "launches, for which its device waits",
}
EVERY_STEPS = 8
QUIET_STEPS = 500
KEPT = 128


class RunFinding(Struct, kw_only=True):
    """One finding. ``picture``: which series or rows show it."""

    time: float  # seconds since 1970
    kind: str
    job: int = 0
    rank: int = -1
    node: str = ""
    evidence: dict[str, Any] = {}
    sentence: str = ""
    suggestion: str = ""
    picture: dict[str, Any] = {}


SUGGESTIONS = {
    "straggler": "Look at the rank's clocks, temperature and neighbours: `phalanx doctor node` on "
    "its node; with spares, the core swaps it.",
    "throughput_regression": "Compare the parts of the step before and after: data, communication "
    "or compute grew; `phalanx profile {job}` shows which.",
    "behind_plan": "Open the plan beside the measured parts (MFU waterfall): the largest gap names "
    "what to change.",
    "data_starvation": "Raise data.prefetch, move the shards nearer, or use data.shuffle = "
    '"blocked" on object stores.',
    "loss_spike": "Look at the batch (cursor in the evidence) and the learning rate; a rollback "
    "that skips the batch is set in the job's recovery.",
    "gradient_explosion": "Lower the learning rate or optimizer.clip_norm; check the data of the "
    "steps before.",
    "memory_creep": "Something keeps tensors alive: compare two memory snapshots "
    "(torch.cuda.memory._snapshot; on CPU tracemalloc), or lower micro_batch before it runs out.",
    "checkpoint_slowdown": "The store has become slow or full: look at its throughput, or save "
    "less often (checkpoint.every).",
    "silent_corruption": "The node computed something else than its replica: keep it out until "
    "`phalanx doctor node` passes.",
    "device_error": "Look at the node's kernel log; `phalanx nodes {node}` has its history.",
    "throttling": "Cooling or power limits the GPU: look at inlet temperature and power cap.",
    "ecc_growth": "Reset the GPU; when errors come back, have it replaced.",
    "node_lost": "The node is silent: look at its console; the gang goes on without it.",
    "worker_exited": "`phalanx logs {job} --rank {rank}` has its last words.",
    "restore_failed": "The next older state is tried; `phalanx ckpt verify` names what is damaged.",
    "hang": "Stacks of all ranks are in their logs; the ranks behind are named in the evidence.",
    "idle": "Its processes use no CPU or GPU and print nothing: `phalanx logs {job}` has what they "
    "said last; `phalanx submit --idle-minutes` has such a program restarted.",
    "server_fault": "A part of the server failed on something and left it out; its log has the "
    "traceback: report it as a bug. Jobs and agents go on.",
    "slow_storage": "Checkpoints wait for their turn: spread them, or give the store more.",
}
_DEVICE_KINDS: dict[str, str] = {
    Cause.THERMAL: "throttling",
    Cause.HBM_ECC: "ecc_growth",
    Cause.SRAM_ECC: "ecc_growth",
}
_DEVICE_PICTURES = {
    "throttling": ["gpu_temperature_celsius", "gpu_sm_clock_megahertz", "gpu_power_watts"],
    "ecc_growth": ["gpu_ecc_corrected", "gpu_ecc_uncorrected"],
}
_DISAGREED = "ranks came to different bits of the same weights or gradients"
_LOAD = ["load", "memory_used_bytes"]  # what a node did before something happened to it


def from_event(body: EventBody, time_ns: int, node_name: dict[int, str]) -> RunFinding | None:
    """What an event of the log means to a person; None: nothing to find in it."""
    finding = _found(body)
    if finding is None:
        return None
    kind, sentence, evidence, picture = finding
    number = getattr(body, "node", -1)
    job, rank = job_of(body), int(getattr(body, "rank", -1))
    node = node_name.get(number, "") if isinstance(number, int) else ""
    return RunFinding(
        time=time_ns / 1e9,
        kind=kind,
        job=job,
        rank=rank,
        node=node,
        evidence=evidence,
        sentence=sentence,
        suggestion=suggestion(kind, job, rank, node),
        picture=picture,
    )


def suggestion(kind: str, job: int = 0, rank: int = -1, node: str = "") -> str:
    """What to do about a kind of finding, with its commands ready to be copied."""
    text = SUGGESTIONS.get(kind, "")
    text = text.replace("{job}", str(job) if job else "JOB").replace("{node}", node or "NAME")
    return text.replace("{rank}", str(rank) if rank >= 0 else "R")


Found = tuple[str, str, dict[str, Any], dict[str, Any]]


def _found(body: EventBody) -> Found | None:
    match body:
        case SlowRank(rank=rank, part=part, slowdown_ppm=ppm):
            return (
                "straggler",
                f"rank {rank} takes {percent(ppm)} longer than its peers for {SLOW_PARTS[part]}",
                {"slowdown_ppm": ppm, "part": part},
                {"ranks": "own_seconds", "rank": rank},
            )
        case ThroughputRegression(step=step, slowdown_ppm=ppm):
            return (
                "throughput_regression",
                f"steps before {step} take {percent(ppm)} longer than those before them",
                {"slowdown_ppm": ppm, "step": step},
                {"series": ["step_seconds", "mfu"], "step": step},
            )
        case DataStarved(share_ppm=ppm):
            return (
                "data_starvation",
                f"{percent(ppm)} of the time is spent waiting for data",
                {"share_ppm": ppm},
                {"series": ["data_seconds", "step_seconds"]},
            )
        case LossSpike(step=step, not_finite=broken):
            what = "is not a finite number" if broken else "is far above what it was"
            return (
                "loss_spike",
                f"the loss of step {step} {what}",
                {"step": step, "not_finite": broken},
                {"series": ["loss", "grad_norm"], "step": step},
            )
        case NoProgress(limit="idle", quiet_ns=quiet_ns):
            text = f"it reports no steps, and shows no activity for {quiet_ns // 10**9} s"
            return ("idle", text, _facts(body), {"devices": _LOAD})
        case NoProgress(step=step, quiet_ns=quiet_ns, setting=setting):
            text = f"no step after {step} within the deadline"
            if setting:
                text = f"no step after {step} for {quiet_ns // 10**9} s: more than {setting} allows"
            return ("hang", text, _facts(body), {"series": ["step_seconds"], "step": step})
        case Corruption():
            picture = {"series": ["loss", "grad_norm"]}
            return ("silent_corruption", _DISAGREED, _facts(body), picture)
        case DeviceError(cause=cause, detail=detail):
            kind = _DEVICE_KINDS.get(cause, "device_error")
            text = f"{cause.replace('_', ' ')}{': ' + detail if detail else ''}"
            evidence = {"cause": cause, "gpu": body.gpu, "detail": detail[:500]}
            return (kind, text[:500], evidence, {"devices": _DEVICE_PICTURES.get(kind, _LOAD)})
        case WorkerExited(rank=rank, cause=cause, detail=detail) if (
            cause and cause != Cause.LOST_PEER
        ):
            text = f"rank {rank} ended: {cause.replace('_', ' ')}{f' ({detail})' if detail else ''}"
            evidence = {"cause": cause, "detail": detail[:1000], "step": body.step}
            return ("worker_exited", text[:500], evidence, {"series": ["loss"], "step": body.step})
        case NodeSilent(connection_lost=lost):
            text = "its connection broke" if lost else "it said nothing for too long"
            return ("node_lost", text, {"connection_lost": lost}, {"devices": _LOAD})
        case StorageSlow(bytes_per_second=rate) if rate >= 0:
            picture = {"series": ["checkpoint_seconds"]}
            return ("slow_storage", "the checkpoint store is slow", _facts(body), picture)
    return None


def _facts(body: EventBody) -> dict[str, Any]:
    return {name: getattr(body, name) for name in body.__struct_fields__}


def percent(ppm: int) -> str:
    """Parts per million as a person reads them."""
    return f"{ppm / 10_000:.0f} %"


class Trend(Struct):
    """What is kept of one job to ask the trend detectors."""

    steps: list[int] = field(default_factory=list)  # nanoseconds each
    peaks: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT))
    norms: deque[float | None] = field(default_factory=lambda: deque(maxlen=KEPT))
    saves: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    said: dict[str, int] = field(default_factory=dict)


class Trends:
    """Asks the slow detectors as steps come in."""

    def __init__(self) -> None:
        self._jobs: dict[int, Trend] = {}

    def forget(self, job: int) -> None:
        """Nothing more comes of a job."""
        self._jobs.pop(job, None)

    def step(
        self,
        job: int,
        step: int,
        time_ns: int,
        *,
        seconds: float,
        planned_seconds: float,
        memory_bytes: int,
        grad_norm: float | None,
    ) -> list[RunFinding]:
        """A step was made."""
        trend = self._jobs.setdefault(job, Trend())
        trend.steps = [*trend.steps[1 - KEPT :], int(seconds * 1e9) if seconds == seconds else 0]
        trend.norms.append(grad_norm)
        raised: list[tuple[str, str, int, list[str]]] = []
        if (ppm := gradient_explosion(list(trend.norms))) is not None:
            text = f"the gradient norm is {ppm / MILLION + 1:.0f} times its usual value"
            raised.append(("gradient_explosion", text, ppm, ["grad_norm", "loss"]))
        if step % EVERY_STEPS == 0:
            trend.peaks.append(memory_bytes)
            if (ppm := memory_creep(list(trend.peaks))) is not None:
                text = (
                    f"memory grew by {percent(ppm)} within {len(trend.peaks) * EVERY_STEPS} steps"
                )
                raised.append(("memory_creep", text, ppm, ["peak_memory_bytes"]))
            if (ppm := below_plan(trend.steps, int(planned_seconds * 1e9))) is not None:
                text = f"steps take {percent(ppm)} longer than the plan says"
                raised.append(("behind_plan", text, ppm, ["step_seconds", "plan_efficiency"]))
        return [each for each in (_new(trend, job, step, time_ns, *one) for one in raised) if each]

    def saved(self, job: int, step: int, time_ns: int, seconds: float) -> list[RunFinding]:
        """A checkpoint is complete; training was held up for so long."""
        trend = self._jobs.setdefault(job, Trend())
        trend.saves.append(seconds)
        ppm = slow_saves(list(trend.saves))
        if ppm is None:
            return []
        text = f"the last saves held up training {percent(ppm)} longer than before"
        series = ["checkpoint_seconds"]
        made = _new(trend, job, step, time_ns, "checkpoint_slowdown", text, ppm, series)
        return [made] if made else []


def _new(
    trend: Trend,
    job: int,
    step: int,
    time_ns: int,
    kind: str,
    sentence: str,
    ppm: int,
    series: list[str],
) -> RunFinding | None:
    last = trend.said.get(kind)
    if last is not None and 0 <= step - last < QUIET_STEPS:
        return None
    trend.said[kind] = step
    return RunFinding(
        time=time_ns / 1e9,
        kind=kind,
        job=job,
        evidence={"ppm": ppm, "step": step},
        sentence=sentence,
        suggestion=suggestion(kind, job),
        picture={"series": series, "step": step},
    )
