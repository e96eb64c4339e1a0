"""The training loop: it makes steps; everything beside is attached to it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec

from phalanx.checkpoint import Checkpointer
from phalanx.data import DataExhausted
from phalanx.train.callback import Callback, Callbacks, TrainingRun
from phalanx.train.exits import NOT_ARCHIVED, EndReason, ExitCode, ExitInfo, now
from phalanx.train.kernels import kernel_sharing
from phalanx.train.measure.profile import ProfileAsk, StepProfiler
from phalanx.train.measure.step_metrics import StepMetrics, Validation
from phalanx.train.optim.muon import MuonPartition
from phalanx.train.rank.orders import StepOrders, WriteLease
from phalanx.train.report.run_folder import RunFolder
from phalanx.train.report.sinks import Sinks
from phalanx.train.resume.checkpoints import Checkpoints
from phalanx.train.trainer import StepVote, Trainer


def train(run: TrainingRun) -> ExitInfo:
    """Make steps until the job's last one, or until somebody asks the run to stop."""
    try:
        run.callbacks.begin(run)
        run.trainer.timer.restart()  # building and loading are not part of the first step
        stopped = False if run.saves_only else make_steps(run)
    except BaseException as error:
        failure = run.callbacks.end(run, error)
        if failure is not None and isinstance(error, DataExhausted):
            raise failure from error  # the last state, which was to be kept
        raise
    if (failure := run.callbacks.end(run, None)) is not None:
        raise failure
    if run.saves_only:
        return ended(run, EndReason.DRAIN, "saved before the end")
    if stopped:
        return ended(run, run.orders.stop.reason or EndReason.STOPPED, "stopped on request")
    return ended(run, EndReason.DONE, "all steps are done")


def make_steps(run: TrainingRun) -> bool:
    """One after the other; returns whether all ranks agreed to stop before the last."""
    trainer, callbacks, last = run.trainer, run.callbacks, run.job.train.steps
    before_update = partial(callbacks.before_update, run)
    before_forward = partial(callbacks.before_forward, run)
    while trainer.step < last:
        callbacks.before_step(run)
        outcome = trainer.train_step(vote(run), before_update, before_forward)
        run.orders.stop.started()  # from here on there is something to save
        callbacks.after_step(run, outcome)
        if outcome.stop:
            return True
    return False


def vote(run: TrainingRun) -> StepVote:
    """What this rank has to say to the others with its next step."""
    rate = run.orders.failure_rate()
    return StepVote(
        stop=run.orders.stop.requested,
        shares=run.orders.shares(),
        may_write=run.lease is None or run.lease.may_write() is not None,
        keeper_late=run.checkpointer.prompt and run.checkpointer.late,
        failure_rate=rate.per_million_node_days if rate else 0,
    )


def ended(run: TrainingRun, reason: str, message: str) -> ExitInfo:
    """The report of a run that ended as it should."""
    how = run.time_text
    if run.step < run.first_step:
        how = "where it started: raise train.steps to go on"
    return ExitInfo(
        code=ExitCode.DONE,
        reason=reason,
        message=f"{message} at step {run.step}, {how}",
        step=run.step,
        checkpoint=run.checkpoint,
        details=run.details,
        finished=now(),
    )


def judged_by_archive(info: ExitInfo) -> ExitInfo:
    """A run that did all its steps has not ended well where the archive lacks a checkpoint."""
    if info.reason != EndReason.DONE or NOT_ARCHIVED not in info.details:
        return info
    missing = f"not in the archive: {info.details[NOT_ARCHIVED]}"
    return msgspec.structs.replace(
        info,
        code=ExitCode.NOT_ARCHIVED,
        reason=EndReason.NOT_ARCHIVED,
        message=f"{info.message}; {missing}",
        advice="The checkpoints are on disk: copy their folders there, or start the job again.",
    )


def evaluations(trainer: Trainer) -> list[Callback]:
    """What scores the model on the way, where the job wants it; else nothing of it is loaded."""
    if not trainer.job.evaluate.every:
        return []
    from phalanx.train.evaluate.callback import GangEvaluation

    return [GangEvaluation()]


def attach(
    trainer: Trainer,
    folder: RunFolder,
    sinks: Sinks,
    checkpointer: Checkpointer,
    orders: StepOrders,
    *,
    callbacks: Sequence[Callback] = (),
    innermost: Sequence[Callback] = (),
    ask: ProfileAsk | None = None,
    lease: WriteLease | None = None,
    saves_only: bool = False,
) -> TrainingRun:
    """A run with everything that belongs to each, and ``callbacks`` nearer to the step than that.

    Traces show the step without other callbacks, but with the ``innermost``.
    """
    profiler = StepProfiler(trainer.job.log, folder, trainer.timer, ask)
    layers: list[Callback] = [
        *evaluations(trainer),
        MuonPartition(),
        Validation(),
        StepMetrics(trainer),
        Checkpoints(trainer, checkpointer),
        *kernel_sharing(trainer.job, trainer.mesh),
        *callbacks,
        profiler,
        *innermost,
    ]
    return TrainingRun(
        trainer,
        folder,
        sinks,
        checkpointer,
        orders,
        Callbacks(layers),
        lease=lease,
        saves_only=saves_only,
    )
