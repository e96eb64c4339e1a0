"""What attaches to the training loop: checkpoints, metrics, traces, and code of one's own.

The loop makes steps; everything beside is a ``Callback``. Callbacks are a list in a fixed order,
so that none takes the place of another, and what only one may do is claimed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from phalanx.train.exits import EndReason

if TYPE_CHECKING:
    from torch import Tensor

    from phalanx.checkpoint import Checkpointer
    from phalanx.config import Job
    from phalanx.data import Batch
    from phalanx.train.rank.orders import StepOrders, WriteLease
    from phalanx.train.report.records import CheckpointRecord
    from phalanx.train.report.run_folder import RunFolder
    from phalanx.train.report.sinks import Sinks
    from phalanx.train.trainer import StepOutcome, Trainer

log = logging.getLogger(__name__)

SAVING, STEP_TIMES, TRACING = "saving state", "the step times", "tracing chosen steps"  # claims


class Callback:
    """Something attached to the loop. Hooks do nothing unless a subclass defines them.

    They run on every rank, in its main thread. What a step computed is on the device: reading it
    (``.item()``) makes the host wait. A hook that communicates must do so on all ranks alike. An
    exception ends the rank, as any other does, and the report names the callback.
    """

    claims: frozenset[str] = frozenset()  # what no other callback of the run may do as well

    @property
    def name(self) -> str:
        """What messages call it."""
        return type(self).__name__

    def begin(self, run: TrainingRun) -> None:
        """The state is built or restored, and no step is made yet."""

    def before_step(self, run: TrainingRun) -> None:
        """Step ``run.step + 1`` is about to be made; its batch has not been asked for."""

    def before_forward(self, run: TrainingRun, batches: list[Batch], token_weight: Tensor) -> None:
        """Step ``run.step + 1`` has its data, and no gradient yet.

        ``batches`` are this rank's micro-batches; ``token_weight`` [] is that of one token in the
        loss, on the device.
        """

    def before_update(self, run: TrainingRun) -> None:
        """Gradients are summed over all ranks, and the optimizer is about to change the state.

        No copy of the state is under way: here and in ``after_step`` it may be changed.
        """

    def after_step(self, run: TrainingRun, outcome: StepOutcome) -> None:
        """Step ``run.step`` is made, and not saved yet."""

    def save(self, run: TrainingRun, record: CheckpointRecord) -> None:
        """A checkpoint is complete at ``record.path``, or why not: ``record.problem``.

        It is written while training goes on: ``record.step`` is often older than ``run.step``.
        """

    def end(self, run: TrainingRun, error: BaseException | None) -> None:
        """No step follows; all saves are complete. Called wherever ``begin`` succeeded.

        ``error`` ends the rank; a peer may be lost then, so that nothing may be communicated.
        """


Hook = Literal["before_step", "before_forward", "before_update", "after_step", "save"]


class CallbackConflict(Exception):  # noqa: N818 - a mistake of whoever attaches
    """Two attachments want what only one can have."""


class Callbacks:
    """The attachments of a run, in layers around the step: the last one is nearest to it.

    Hooks run in the order of the list, and ``after_step`` in the opposite one.
    """

    def __init__(self, callbacks: Iterable[Callback] = ()) -> None:
        self._all = tuple(callbacks)
        _refuse_conflicts(self._all)
        self._begun: list[Callback] = []
        # Only what is defined is called: a hook that nobody uses costs nothing.
        self._hooks = {hook: _defined(self._all, hook) for hook in get_args(Hook)}
        self._hooks["after_step"].reverse()

    def begin(self, run: TrainingRun) -> None:
        for each in self._all:
            _named(each.name, "begin", each.begin, run)
            self._begun.append(each)

    def before_step(self, run: TrainingRun) -> None:
        self._call("before_step", run)

    def before_forward(self, run: TrainingRun, batches: list[Batch], token_weight: Tensor) -> None:
        self._call("before_forward", run, batches, token_weight)

    def before_update(self, run: TrainingRun) -> None:
        self._call("before_update", run)

    def after_step(self, run: TrainingRun, outcome: StepOutcome) -> None:
        self._call("after_step", run, outcome)

    def save(self, run: TrainingRun, record: CheckpointRecord) -> None:
        self._call("save", run, record)

    def end(self, run: TrainingRun, error: BaseException | None) -> Exception | None:
        """Have all of them end, whichever fails; returns the first failure."""
        failure: Exception | None = None
        for each in self._begun:
            try:
                _named(each.name, "end", each.end, run, error or failure)
            except Exception as raised:
                if error is not None or failure is not None:
                    log.error("%s failed at the end as well", each.name, exc_info=raised)
                failure = failure or raised
        self._begun = []
        return failure

    def _call(self, hook: Hook, *arguments: object) -> None:
        for name, method in self._hooks[hook]:
            _named(name, hook, method, *arguments)


def _defined(callbacks: Iterable[Callback], hook: Hook) -> list[tuple[str, Callable[..., None]]]:
    base = getattr(Callback, hook)
    return [(c.name, getattr(c, hook)) for c in callbacks if getattr(type(c), hook) is not base]


def _named(name: str, hook: str, method: Callable[..., None], *arguments: object) -> None:
    """Call a hook; whatever it raises says where it comes from."""
    try:
        method(*arguments)
    except Exception as error:
        error.add_note(f"in {name}.{hook}")
        raise


def _refuse_conflicts(callbacks: tuple[Callback, ...]) -> None:
    claimed: dict[str, Callback] = {}
    for number, each in enumerate(callbacks):
        if not isinstance(each, Callback):
            raise CallbackConflict(f"{each!r} is no Callback: derive its class from it")
        if any(each is other for other in callbacks[:number]):
            raise CallbackConflict(f"{each.name} is attached twice: attach it once")
        for claim in sorted(each.claims):
            if (other := claimed.setdefault(claim, each)) is not each:
                both = f"{other.name} and {each.name}"
                raise CallbackConflict(f"{both} both claim {claim}: attach only one of them")


@dataclass
class TrainingRun:
    """What callbacks know of the run that they are attached to, on this rank."""

    trainer: Trainer
    folder: RunFolder
    sinks: Sinks  # where records go
    checkpointer: Checkpointer
    orders: StepOrders
    callbacks: Callbacks
    lease: WriteLease | None = None  # to be asked for before a checkpoint is written
    saves_only: bool = False  # no step is made: what was restored is saved, and that is all
    first_step: int = field(init=False)
    checkpoint: str = ""  # the newest that is complete
    snapshot_every: int = 0  # steps between snapshots in memory; 0: none are kept
    time_text: str = ""  # where the time went, for the last line of the run
    details: dict[str, Any] = field(default_factory=dict)  # what else the exit report says

    def __post_init__(self) -> None:
        self.first_step = self.trainer.step + 1

    @property
    def job(self) -> Job:
        """What the run is asked for, every setting explicit."""
        return self.trainer.job

    @property
    def step(self) -> int:
        """The last step that is complete; 0: none."""
        return self.trainer.step

    @property
    def rank(self) -> int:
        """Of this process in the run."""
        return self.trainer.mesh.rank

    def is_last(self, outcome: StepOutcome) -> bool:
        """Whether no step follows this one."""
        return outcome.stop or self.step == self.job.train.steps

    def request_stop(self, reason: str) -> None:
        """Have all ranks stop after the next step and save; asked for by any of them."""
        if reason in set(EndReason):
            raise ValueError(f"{reason!r} is how runs end otherwise: give a reason of your own")
        self.orders.stop.reason = self.orders.stop.reason or reason
