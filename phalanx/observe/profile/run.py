"""Makes a few steps of a job on this machine, with and without its corpus: a profile of it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import structs

from phalanx.config import Data, Evaluate, Job, Schedule
from phalanx.hardware import lookup
from phalanx.observe.profile.analyse import analyse
from phalanx.observe.profile.events import read_events
from phalanx.observe.profile.profile import JobProfile, Origin, StepTimes
from phalanx.observe.profile.syncs import host_syncs
from phalanx.observe.tracker.runs import load_folder
from phalanx.observe.tracker.traces import trace_of
from phalanx.plan.memory.model_counts import flops_per_token
from phalanx.train.exits import EndReason, ExitInfo
from phalanx.train.profile.facts import ProfileFacts, ProfileFiles
from phalanx.train.report.records import Record, StepRecord, read_records
from phalanx.train.report.run_folder import RunFolder

if TYPE_CHECKING:
    from phalanx.train.callback import Callback
    from phalanx.train.profile.recorder import ProfileRecorder


class ProfileError(Exception):
    """A profiled run did not make its steps."""

    def __init__(self, info: ExitInfo, folder: RunFolder) -> None:
        super().__init__(f"{info.message} {info.advice}".strip() + f" (logs: {folder.logs})")


def profile_job(
    job: Job,
    ranks: int,
    out: Path,
    recorder: ProfileRecorder,
    *,
    callbacks: Sequence[Callback] = (),
    say: Callable[[str], None] = lambda _: None,
) -> JobProfile:
    """Profile a resolved job; its runs lie below ``out``. ``callbacks`` are the job's own."""
    short = shortened(job, recorder.steps, out)
    say(f"{recorder.steps} steps on {ranks} ranks")
    real = _run(short, ranks, [recorder, *callbacks], say)
    synthetic = None
    if job.data.source != "synthetic":
        say(f"{recorder.first - 1} steps with synthetic data")
        without = structs.replace(
            short,
            data=without_corpus(short.data),
            train=structs.replace(short.train, steps=recorder.first - 1),
        )
        synthetic = step_times(_run(without, ranks, callbacks, say), recorder)
    files = ProfileFiles(real)
    trace = trace_of(files.trace.read_bytes(), str(files.trace))
    analysis = analyse(read_events(trace), only_axis(job))
    syncs = host_syncs(trace_of(files.stacks.read_bytes(), str(files.stacks)))
    files.stacks.unlink()  # as large as all else together, and said
    facts = files.read_facts()
    times = step_times(real, recorder)
    peak, mfu = model_flops_share(job, facts, times)
    return JobProfile(
        name=job.name,
        origin=origin_of(real),
        device=facts.device,
        device_name=facts.device_name,
        world_size=facts.world_size,
        job=msgspec.to_builtins(job),
        times=times,
        synthetic=synthetic,
        traced_seconds=analysis.seconds,
        kinds=analysis.kinds,
        phases=analysis.phases,
        axes=analysis.axes,
        kernels=analysis.kernels,
        matmul_formats=analysis.matmul_formats,
        recomputed_seconds=analysis.recomputed_seconds,
        gaps=analysis.gaps,
        longest_gap_seconds=analysis.longest_gap_seconds,
        syncs=syncs,
        rates=facts.rates,
        peak_flops=peak,
        mfu=mfu,
        memory=facts.memory,
        memory_line=analysis.memory,
        power=facts.power,
        graphs=facts.graphs,
        recompiles=facts.recompiles,
    )


def shortened(job: Job, steps: int, out: Path) -> Job:
    """The same steps, and nothing else: no saves, validations, trackers or ramps."""
    train = structs.replace(
        job.train, steps=steps, batch_ramp=(), sequence_stages=(), validate_every=0
    )
    checkpoint = structs.replace(
        job.checkpoint, interval="off", every=0, memory_every=0, at_end=False, resume="", load_hf=""
    )
    log = structs.replace(
        job.log, tensorboard=False, wandb=False, mlflow=False, artifacts=(), profile_steps=None
    )
    return structs.replace(
        job,
        runs=str(out / "runs"),
        train=train,
        checkpoint=checkpoint,
        evaluate=Evaluate(),
        log=log,
        schedule=Schedule(kind="constant"),
    )


def without_corpus(data: Data) -> Data:
    """Generated tokens of the same length."""
    return Data(sequence=data.sequence, seed=data.seed, prefetch=data.prefetch)


def only_axis(job: Job) -> str:
    """The axis that communicates, where just one does: groups on CPU do not tell theirs."""
    axes = ("data", "tensor", "pipeline", "context")
    talking = [axis for axis in axes if getattr(job.parallel, axis) > 1]
    return talking[0] if len(talking) == 1 and job.parallel.expert == 1 else ""


def _run(
    job: Job, ranks: int, callbacks: Sequence[Callback], say: Callable[[str], None]
) -> RunFolder:
    """Fork the ranks and wait for them; ConfigError, or ``ProfileError`` where they fail."""
    from phalanx.train.rank.launch import prepare_launch, start_ranks

    gang, folder = prepare_launch(job, ranks)
    reader = start_ranks(job, ranks, folder, gang, callbacks)

    def show(record: Record) -> None:
        if isinstance(record, StepRecord):
            say(f"step {record.step}: {record.step_seconds * 1e3:.4g} ms")

    gang.watch(reader, show)
    info = gang.verdict()
    if info.reason != EndReason.DONE:
        raise ProfileError(info, folder)
    return folder


def step_times(folder: RunFolder, recorder: ProfileRecorder) -> StepTimes:
    """The undisturbed steps: those after the ones that warm up and before the traced ones."""
    own = [
        record
        for record in read_records(folder.steps, StepRecord)
        if recorder.first - recorder.timed <= record.step < recorder.first
    ]
    seconds = sorted(record.step_seconds for record in own)
    quarter = len(seconds) // 4
    return StepTimes(
        median_seconds=statistics.median(seconds),
        spread_seconds=seconds[-1 - quarter] - seconds[quarter],
        steps=len(own),
        data_seconds=statistics.median(record.parts.data for record in own),
        tokens=own[-1].tokens,
    )


def model_flops_share(
    job: Job, facts: ProfileFacts, times: StepTimes
) -> tuple[float | None, float | None]:
    """The catalogue's peak of one device in the format that computes, and MFU against it."""
    gpu = lookup(facts.device_name)
    name = "fp8" if job.precision.fp8 else job.precision.compute
    peak = gpu.peak_flops.get(name) if gpu is not None else None
    if peak is None:
        return None, None
    flops = flops_per_token(job.model, job.data.sequence, job.log.mfu).model_flops
    return peak, times.tokens_per_second * flops / (peak * facts.world_size)


def origin_of(folder: RunFolder) -> Origin:
    """Where the profiled run came from, as it wrote down itself."""
    provenance = load_folder(folder.path).provenance
    code = provenance.get("project") or provenance.get("code") or {}
    return Origin(
        created=str(provenance.get("started", "")),
        host=str(provenance.get("host", "")),
        commit=str(code.get("commit", "")),
        changed=bool(code.get("dirty", False)),
        torch=str((provenance.get("torch") or {}).get("version", "")),
    )
