"""What attaches to the loop: in a fixed order, none in another's place, and each named."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from phalanx.checkpoint import Checkpointer, CheckpointError, latest
from phalanx.checkpoint.keeper import background
from phalanx.checkpoint.write.snapshot import ShardSnapshot
from phalanx.config import Job, to_toml
from phalanx.data import Batch, DataExhausted, ShardWriter
from phalanx.parallel import build_mesh
from phalanx.train import CheckpointRecord
from phalanx.train.callback import Callback, CallbackConflict, Callbacks, TrainingRun
from phalanx.train.exits import ExitCode, ExitInfo
from phalanx.train.optim.fingerprint import Fingerprints
from phalanx.train.rank import loop
from phalanx.train.rank.diagnose import classify
from phalanx.train.rank.local_orders import LocalOrders
from phalanx.train.report import run_folder
from phalanx.train.report.sinks import Sinks
from phalanx.train.resume.checkpoints import Checkpoints
from phalanx.train.resume.saving import prepare_saves
from phalanx.train.trainer import StepOutcome, Trainer
from tests.commands import run_forked
from tests.ranks import run_ranks
from tests.train.forked_runs import Run, small_job

NO_RUN: Any = SimpleNamespace(step=0)
NO_OUTCOME: Any = None
DOCS = Path(__file__).parents[2] / "docs" / "how-to" / "attach-your-own-code.md"


class Noted(Callback):
    """Writes down each call."""

    def __init__(self, said: list[str], name: str, claims: Sequence[str] = ()) -> None:
        self._said, self._name, self.claims = said, name, frozenset(claims)

    @property
    def name(self) -> str:
        return self._name

    def begin(self, run: TrainingRun) -> None:
        self._said.append(f"{self._name} begin")

    def before_step(self, run: TrainingRun) -> None:
        self._said.append(f"{self._name} before {run.step + 1}")

    def before_forward(self, run: TrainingRun, batches: list[Batch], token_weight: Tensor) -> None:
        self._said.append(f"{self._name} forward")

    def before_update(self, run: TrainingRun) -> None:
        self._said.append(f"{self._name} update")

    def after_step(self, run: TrainingRun, outcome: StepOutcome) -> None:
        self._said.append(f"{self._name} after {run.step}")

    def save(self, run: TrainingRun, record: CheckpointRecord) -> None:
        self._said.append(f"{self._name} save {record.step}")

    def end(self, run: TrainingRun, error: BaseException | None) -> None:
        self._said.append(f"{self._name} end {error}")


def broken(hook: str, error: Exception) -> Callback:
    """One that fails in a hook."""

    def fail(*_: object) -> None:
        raise error

    made: Callback = type("Broken", (Callback,), {hook: fail})()
    return made


def test_two_callbacks_are_layers_around_the_step() -> None:
    said: list[str] = []
    both = Callbacks([Noted(said, "outer"), Noted(said, "inner")])
    both.begin(NO_RUN)
    both.before_step(NO_RUN)
    both.before_forward(NO_RUN, [], torch.ones(()))
    both.before_update(NO_RUN)
    both.after_step(NO_RUN, NO_OUTCOME)
    assert both.end(NO_RUN, None) is None
    assert said == [
        *("outer begin", "inner begin", "outer before 1", "inner before 1"),
        *("outer forward", "inner forward"),
        *("outer update", "inner update", "inner after 0", "outer after 0"),
        *("outer end None", "inner end None"),
    ]


def test_hooks_that_nobody_defines_are_not_called() -> None:
    class Ends(Callback):
        def end(self, run: TrainingRun, error: BaseException | None) -> None:
            pass

    assert not any(Callbacks([Ends(), Callback()])._hooks.values())


def test_what_only_one_may_do_is_refused_to_a_second() -> None:
    first, second = Noted([], "first", ["saving state"]), Noted([], "second", ["saving state"])
    sentence = "first and second both claim saving state: attach only one of them"
    with pytest.raises(CallbackConflict, match=sentence):
        Callbacks([first, Noted([], "other"), second])


def test_one_callback_is_attached_once() -> None:
    one = Noted([], "one")
    with pytest.raises(CallbackConflict, match="one is attached twice"):
        Callbacks([one, one])


def test_what_is_no_callback_is_refused() -> None:
    with pytest.raises(CallbackConflict, match="is no Callback"):
        Callbacks([print])  # type: ignore[list-item]


HOOKS = ["begin", "before_step", "before_forward", "before_update", "after_step", "save"]


@pytest.mark.parametrize("hook", HOOKS)
def test_an_error_keeps_its_type_and_names_the_callback(hook: str) -> None:
    callbacks = Callbacks([broken(hook, OverflowError("too much"))])
    arguments = {"after_step": (NO_OUTCOME,), "save": (NO_OUTCOME,)}
    more = (arguments | {"before_forward": ([], torch.ones(()))}).get(hook, ())
    with pytest.raises(OverflowError) as caught:
        getattr(callbacks, hook)(NO_RUN, *more)
    info = classify(caught.value, rank=1, step=3)
    assert (info.code, info.message) == (ExitCode.OTHER, f"too much (in Broken.{hook})")


def test_all_end_whichever_fails_and_hear_why() -> None:
    said: list[str] = []
    failing = broken("end", ValueError("no end"))
    callbacks = Callbacks([Noted(said, "first"), failing, Noted(said, "last")])
    callbacks.begin(NO_RUN)
    failure = callbacks.end(NO_RUN, None)
    assert isinstance(failure, ValueError)
    assert said[-2:] == ["first end None", "last end no end"]


def test_who_did_not_begin_does_not_end() -> None:
    said: list[str] = []
    failing = broken("begin", ValueError("no start"))
    callbacks = Callbacks([Noted(said, "first"), failing, Noted(said, "last")])
    with pytest.raises(ValueError, match="no start"):
        callbacks.begin(NO_RUN)
    callbacks.end(NO_RUN, ValueError("no start"))
    assert said == ["first begin", "first end no start"]


# The loop, on one rank.


class Failed(NamedTuple):
    """The exception that a run ended with, and what it was raised from."""

    error: type[BaseException]
    cause: type[BaseException | None]
    notes: list[str]


Made = tuple[ExitInfo | Failed, list[str], dict[str, Tensor]]


def make_run(
    job: Job, folder: Path, *callbacks: Callback
) -> tuple[TrainingRun, Checkpointer, Trainer]:
    device = torch.device("cpu")
    trainer = Trainer(job, build_mesh(job, device), device)
    checkpointer = Checkpointer(folder / "checkpoints")
    where = run_folder.create(job)
    run = loop.attach(
        trainer, where, Sinks([]), checkpointer, LocalOrders(), callbacks=list(callbacks)
    )
    return run, checkpointer, trainer


def train(job: Job, folder: Path, make: Callable[[list[str]], list[Callback]]) -> Made:
    said: list[str] = []
    run, checkpointer, trainer = make_run(job, folder, *make(said))
    how: ExitInfo | Failed
    try:
        how = loop.train(run)
    except Exception as error:
        how = Failed(type(error), type(error.__cause__), getattr(error, "__notes__", []))
    trainer.close()
    checkpointer.close()
    return how, said, {name: tensor.clone() for name, tensor in trainer.tensors().items()}


def noted(said: list[str]) -> list[Callback]:
    return [Noted(said, "mine")]


def nothing(said: list[str]) -> list[Callback]:
    return []


def test_a_run_calls_its_hooks_in_order_and_ends_after_its_saves(tmp_path: Path) -> None:
    job = small_job(tmp_path, 1, train__steps=2, checkpoint__every=1, checkpoint__mode='"sync"')
    ((info, said, _),) = run_ranks(1, train, job, tmp_path, noted)
    assert info.reason == "done" and info.checkpoint.endswith("step-00000002")
    assert said == [
        "mine begin",
        *("mine before 1", "mine forward", "mine update", "mine after 1", "mine save 1"),
        *("mine before 2", "mine forward", "mine update", "mine after 2", "mine save 2"),
        "mine end None",
    ]


def test_callbacks_change_no_bit_of_training(tmp_path: Path) -> None:
    job = small_job(tmp_path, 1, train__steps=3, train__deterministic="true")
    ((_, _, bare),) = run_ranks(1, train, job, tmp_path / "bare", nothing)
    ((_, _, watched),) = run_ranks(1, train, job, tmp_path / "watched", noted)
    assert bare.keys() == watched.keys()
    assert all(torch.equal(bare[name], watched[name]) for name in bare)


class Stops(Callback):
    """Asks for the end after the second step."""

    def __init__(self, reason: str = "good enough") -> None:
        self.reason = reason

    def after_step(self, run: TrainingRun, outcome: StepOutcome) -> None:
        if run.step == 2:
            run.request_stop(self.reason)


def test_a_callback_may_stop_the_run_which_saves_first(tmp_path: Path) -> None:
    job = small_job(tmp_path, 1, train__steps=9)
    ((info, _, _),) = run_ranks(1, train, job, tmp_path, lambda said: [Stops()])
    assert (info.reason, info.step) == ("good enough", 3)
    saved = latest(tmp_path / "checkpoints")
    assert saved is not None and saved.name.startswith("step-00000003")


def test_a_run_that_a_callback_stops_does_not_pass_for_one_that_made_all_its_steps(
    tmp_path: Path,
) -> None:
    job = small_job(tmp_path, 1, train__steps=9)
    ((failed, _, _),) = run_ranks(1, train, job, tmp_path, lambda said: [Stops("done")])
    assert failed.error is ValueError


class Exhausts(Callback):
    """Its data ends after the second step."""

    def before_step(self, run: TrainingRun) -> None:
        if run.step == 2:
            raise DataExhausted(1, 1, 1)


def test_the_last_state_is_saved_when_the_data_ends(tmp_path: Path) -> None:
    job = small_job(tmp_path, 1)
    ((failed, said, _),) = run_ranks(
        1, train, job, tmp_path, lambda said: [Noted(said, "mine"), Exhausts()]
    )
    assert failed.error is DataExhausted
    assert said[-2] == "mine save 2" and said[-1].startswith("mine end the next step needs")


def test_a_last_state_that_cannot_be_saved_is_what_is_told(tmp_path: Path) -> None:
    def full(self: Checkpointer, *_: object, **__: object) -> Path:
        raise CheckpointError(self.folder, "the disk is full")

    def make(said: list[str]) -> list[Callback]:
        Checkpointer.save = full  # type: ignore[method-assign]
        return [Exhausts()]

    job = small_job(tmp_path, 1)
    ((failed, _, _),) = run_ranks(1, train, job, tmp_path, make)
    assert (failed.error, failed.cause) == (CheckpointError, DataExhausted)


def test_the_error_that_ended_a_run_is_the_one_that_is_told(tmp_path: Path) -> None:
    def fails_twice(said: list[str]) -> list[Callback]:
        return [
            broken("after_step", KeyError("first")),
            broken("end", ValueError("second")),
            Noted(said, "last"),
        ]

    job = small_job(tmp_path, 1)
    ((failed, said, _),) = run_ranks(1, train, job, tmp_path, fails_twice)
    assert (failed.error, failed.notes) == (KeyError, ["in Broken.after_step"])
    assert said[-1] == "last end 'first'"


def prepare_late(job: Job, folder: Path) -> tuple[int, int]:
    """Updates that a callback and the running copies were asked about, of six steps."""
    asked: list[int] = []

    class Prepares(Callback):
        def before_step(self, run: TrainingRun) -> None:
            if run.step == 2:  # as an automatic interval does, long after all are attached
                prepare_saves(run.job, run.trainer, run.checkpointer)
                whole = run.checkpointer.before_update

                def count() -> None:
                    asked.append(run.step)
                    whole()

                run.checkpointer.before_update = count  # type: ignore[method-assign]

    said: list[str] = []
    run, checkpointer, trainer = make_run(job, folder, Noted(said, "mine"), Prepares())
    loop.train(run)
    assert checkpointer.in_background
    trainer.close()
    checkpointer.close()
    return said.count("mine update"), len(asked)


def test_saves_that_are_prepared_late_take_nobodys_place(tmp_path: Path) -> None:
    job = small_job(tmp_path, 1, checkpoint__keeper_lease=5.0)
    assert run_ranks(1, prepare_late, job, tmp_path) == [(6, 4)]


def validate_while_copying(job: Job, folder: Path) -> dict[str, Tensor]:
    """The state after the first step, whose copy begins as late as it may."""
    may_copy, copied, whole = Event(), Event(), ShardSnapshot.copy_into
    background.OVERLAP_BYTES = 0
    found: dict[str, Tensor] = {}

    class Remembers(Callback):
        def after_step(self, run: TrainingRun, outcome: StepOutcome) -> None:
            if run.step == 1:
                found.update({n: each.clone() for n, each in run.trainer.tensors().items()})
                may_copy.clear()  # what is saved now

    def copy_late(self: ShardSnapshot, *arguments: Any) -> None:
        assert may_copy.wait(60)
        whole(self, *arguments)
        copied.set()

    ShardSnapshot.copy_into = copy_late  # type: ignore[method-assign]
    run, checkpointer, trainer = make_run(job, folder, Remembers())
    prepare_saves(job, trainer, checkpointer)
    wait, evaluate = checkpointer.before_update, trainer.engine.evaluate

    def before_update() -> None:
        may_copy.set()
        wait()

    def evaluate_slowly(*arguments: Any) -> Any:
        may_copy.set()
        assert copied.wait(60)
        return evaluate(*arguments)

    checkpointer.before_update = before_update  # type: ignore[method-assign]
    trainer.engine.evaluate = evaluate_slowly  # type: ignore[method-assign]
    loop.train(run)
    trainer.close()
    checkpointer.close()
    return found


CORPUS = {"data__validation_fraction": 0.1, "train__ema": "{decay = 0.9, validate = true}"}
LOOKS: dict[str, dict[str, Any]] = {
    "validation": {"train__validate_every": 1, "train__validate_samples": 4},
    "evaluation": {"evaluate__every": 1},
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_copy_of_the_state_never_holds_the_average_that_is_looked_at(
    look: str, tmp_path: Path
) -> None:
    settings = {**CORPUS, **LOOKS[look], "train__steps": 2, "checkpoint__every": 1}
    if look == "evaluation":
        settings["evaluate__perplexity"] = f'{{near = "{write_domain(tmp_path)}"}}'
    job = small_job(tmp_path, 1, **settings, checkpoint__keeper_lease=5.0)
    (trained,) = run_ranks(1, validate_while_copying, job, tmp_path)
    saved = {name: torch.empty_like(tensor) for name, tensor in trained.items()}
    first = tmp_path / "checkpoints" / "step-00000001"
    Checkpointer(tmp_path / "checkpoints").load(first, saved)
    assert not torch.equal(saved["ema.norm.weight"], saved["model.norm.weight"])
    assert all(torch.equal(tensor, trained[name]) for name, tensor in saved.items())


def write_domain(folder: Path) -> Path:
    """Token shards that are scored."""
    with ShardWriter(folder / "shards", 64, 0) as writer:
        writer.write(range(1, 40))
        writer.end_document()
        writer.finish()
    return folder / "shards"


def order_of(job: Job, folder: Path) -> list[str]:
    run, checkpointer, trainer = make_run(job, folder, Noted([], "mine"))
    layers = [each.name for each in run.callbacks._all]
    trainer.close()
    checkpointer.close()
    return layers


def test_the_order_of_attachments_is_fixed(tmp_path: Path) -> None:
    """Steps are compared and seen by a user before they are saved, and saved before they close."""
    (layers,) = run_ranks(1, order_of, small_job(tmp_path, 1), tmp_path)
    within = ["StepMetrics", "Checkpoints", "mine", "StepProfiler"]
    assert layers == ["MuonPartition", "Validation", *within]


def test_features_attach_as_a_users_code_does() -> None:
    assert issubclass(Fingerprints, Callback) and issubclass(Checkpoints, Callback)
    sentence = "Checkpoints and mine both claim saving state"
    saves = Checkpoints.__new__(Checkpoints)
    with pytest.raises(CallbackConflict, match=sentence):
        Callbacks([saves, Noted([], "mine", Checkpoints.claims)])


# Whole runs.


def test_a_broken_callback_ends_its_run_and_the_report_names_it(tmp_path: Path) -> None:
    failing = broken("after_step", ValueError("no such probe"))
    run = Run(small_job(tmp_path, 2), callbacks=[failing])
    assert run.wait() == ExitCode.OTHER
    assert run.exit.message == "no such probe (in Broken.after_step)"


def test_the_example_of_the_documentation_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    (tmp_path / "good_enough.py").write_text(example)
    (tmp_path / "job.toml").write_text(
        to_toml(small_job(tmp_path / "runs", 2, train__steps=30, checkpoint__at_end="false"))
    )
    program = partial(runpy.run_path, "good_enough.py", run_name="__main__")
    done = run_forked(program, ["good_enough.py"], None, tmp_path, 100.0)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "stopped on request at step 21" in done.stdout
