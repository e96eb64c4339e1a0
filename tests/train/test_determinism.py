"""Two runs are equal to the bit, and so is a run that was interrupted and continued."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from phalanx.checkpoint import Checkpointer, latest
from phalanx.config import Job
from phalanx.data import ShardWriter
from phalanx.parallel import build_mesh
from phalanx.train.rank import loop
from phalanx.train.rank.local_orders import LocalOrders
from phalanx.train.rank.stop import StopFlag
from phalanx.train.report import run_folder
from phalanx.train.report.sinks import Sinks
from phalanx.train.trainer import Trainer
from tests.parallel.test_parity import make_job
from tests.ranks import run_ranks

STEPS = 5
SAMPLES = 24  # an epoch of three steps
MESHES: dict[str, tuple[int, dict[str, Any], dict[str, str]]] = {  # ranks, axes, optimizer
    "single": (1, {}, {}),
    "fsdp2": (2, {"zero": 3}, {}),
    "tp2xfsdp2": (4, {"tensor": 2}, {}),
    "pp2xfsdp2": (4, {"pipeline": 2}, {}),
    "fsdp2-bfloat16": (2, {"zero": 3}, {"state": "bfloat16"}),
    "tp2xfsdp2-int8": (4, {"tensor": 2}, {"state": "int8"}),
    "fsdp3-muon": (3, {"zero": 3}, {"kind": "muon"}),
}
# Each is proved by another one with the same axes, or format, and one more.
IN_SOAK = {"fsdp2", "tp2xfsdp2"}
CASES = [pytest.param(name, marks=pytest.mark.soak if name in IN_SOAK else ()) for name in MESHES]
IN_BLOCKS = {"dim": 256, "ffn": 256}  # rows that hold whole blocks of 8-bit moments

Result = tuple[list[float], str]


def job_on(
    ranks: int, parallel: dict[str, Any], folder: Path, optimizer: dict[str, str] | None = None
) -> Job:
    """A deterministic bf16 job over a corpus of ``SAMPLES`` samples."""
    corpus = folder / "corpus"
    if not corpus.exists():
        tokens = np.random.default_rng(5).integers(1, 64, SAMPLES * 32 + 1)
        with ShardWriter(corpus, vocab=64, end_of_document=0, tokenizer="none") as writer:
            writer.write(tokens)
            writer.finish()
    sections = {
        # Tensor parallelism on CPUs takes its time for each layer. Stages share a weight as well.
        "model": {"layers": 1 if "tensor" in parallel else 2}
        | {"tied_embedding": "pipeline" in parallel}
        | (IN_BLOCKS if (optimizer or {}).get("state") == "int8" else {}),
        "optimizer": optimizer or {},
        "parallel": parallel,
        "precision": {"compute": "bfloat16"},
        "data": {"source": "shards", "path": str(corpus), "sequence": 32, "prefetch": 2},
        "train": {"steps": STEPS, "micro_batch": 2, "deterministic": True},
        "checkpoint": {"at_end": False, "keep": 0},
        "log": {"every": 1, "tensorboard": False},
    }
    return msgspec.structs.replace(make_job(ranks, sections), runs=str(folder / "runs"))


class Losses:
    """A sink that keeps the losses of all steps."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def write(self, record: Any) -> None:
        if hasattr(record, "loss"):
            self.values.append(record.loss)

    def flush(self) -> None: ...

    def close(self) -> None: ...


class Run(NamedTuple):
    """How the steps of a job are made: by the loop, from a checkpoint if so asked.

    ``save_at`` makes the steps without the loop, and saves after some of them. ``kill_at`` sends
    SIGTERM to every rank while micro-batch two of that step is in forward.
    """

    folder: Path
    resume: Path | None = None
    save_at: Sequence[int] = ()
    kill_at: int = 0


def make_steps(job: Job, run: Run) -> Result:
    """Losses, and a digest of all state."""
    device = torch.device("cpu")
    trainer = Trainer(job, build_mesh(job, device), device)
    checkpointer = Checkpointer(run.folder / "checkpoints", keep=0)
    if run.resume is not None:
        trainer.restore(checkpointer.load(run.resume, trainer.tensors()))
    stop, sink = StopFlag(), Losses()
    stop.install()
    if run.kill_at:
        _terminate_in_the_middle(trainer, run.kill_at)
    if run.save_at:
        while trainer.step < job.train.steps:
            sink.values.append(trainer.train_step().loss.item())
            if trainer.step in run.save_at:
                checkpointer.save(trainer.step, trainer.tensors(), trainer.extra())
    else:
        orders = LocalOrders(stop)
        made = loop.attach(trainer, run_folder.create(job), Sinks([sink]), checkpointer, orders)
        loop.train(made)
    trainer.close()
    return sink.values, digest(trainer)


def _terminate_in_the_middle(trainer: Trainer, step: int) -> None:
    seen = 0

    def count(*_: Any) -> None:
        nonlocal seen
        seen += 1
        if trainer.step + 1 == step and seen % 2 == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    first = next(iter(trainer.engine.parts[0].layers.values()))
    first.register_forward_hook(count)


def digest(trainer: Trainer) -> str:
    """Every bit of the state that this rank holds."""
    found = hashlib.sha256()
    for name, tensor in sorted(trainer.tensors().items()):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        flat = local.detach().contiguous().view(-1).view(torch.uint8)  # numpy knows no bf16
        found.update(name.encode() + flat.numpy().tobytes())
    for weight in trainer.engine.weights:
        found.update(weight.local.float().contiguous().numpy().tobytes())
    return found.hexdigest()


def make_runs(ranks: int, job: Job, *runs: Run) -> list[list[Result]]:
    """Runs of a job one after another on new ranks; by run, what each rank came to."""

    def call() -> list[Result]:
        return [make_steps(job, run) for run in runs]

    # Also a single rank is forked: signals and settings stay out of the test process.
    return [list(results) for results in zip(*run_ranks(ranks, call), strict=True)]


class Whole(NamedTuple):
    """A run that nothing interrupted, which the others are compared with."""

    ranks: int
    job: Job
    results: list[Result]


@pytest.fixture(scope="module", params=CASES)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp(request.param)
    ranks, parallel, optimizer = MESHES[request.param]
    job = job_on(ranks, parallel, folder, optimizer)
    return Whole(ranks, job, *make_runs(ranks, job, Run(folder)))


class Saved(NamedTuple):
    """Further runs of the same job: one was saved after some steps and went on, one was stopped."""

    folder: Path
    saved: list[Result]
    stopped: list[Result]  # by SIGTERM in the middle of step two


CUTS = {2: "mid-epoch", 3: "epoch-edge"}


@pytest.fixture(scope="module")
def saved(whole: Whole, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("saved")
    runs = Run(folder, save_at=list(CUTS)), Run(folder / "stopped", kill_at=2)
    return Saved(folder, *make_runs(whole.ranks, whole.job, *runs))


@pytest.fixture(scope="module")
def continued(whole: Whole, saved: Saved) -> dict[int, list[Result]]:
    """What ranks of another set come to, by the step that they continue from; 0: of the stopped."""
    stopped = latest(saved.folder / "stopped" / "checkpoints")
    assert stopped is not None
    starts = {cut: checkpoint_of(saved.folder, cut) for cut in CUTS} | {0: stopped}
    runs = [Run(saved.folder, resume=path) for path in starts.values()]
    return dict(zip(starts, make_runs(whole.ranks, whole.job, *runs), strict=True))


def test_two_runs_are_equal_to_the_bit(whole: Whole, saved: Saved) -> None:
    assert len(whole.results[0][0]) == STEPS
    assert saved.saved == whole.results


@pytest.mark.parametrize("cut", CUTS, ids=CUTS.values())
def test_an_interrupted_run_continues_to_the_bit(
    whole: Whole, saved: Saved, continued: dict[int, list[Result]], cut: int
) -> None:
    assert joined(cut_off(saved.saved, cut), continued[cut]) == whole.results


def test_sigterm_in_the_middle_of_accumulation_loses_nothing(
    whole: Whole, saved: Saved, continued: dict[int, list[Result]]
) -> None:
    done = len(saved.stopped[0][0])
    assert 2 <= done < STEPS, "the signal ends the run early, after the step it arrived in"
    assert joined(saved.stopped, continued[0]) == whole.results


def checkpoint_of(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:08d}"


def cut_off(results: list[Result], steps: int) -> list[Result]:
    """What a run had told of its losses when it was cut off after some steps."""
    return [(losses[:steps], "") for losses, _ in results]


def joined(first: list[Result], rest: list[Result]) -> list[Result]:
    """Two parts of a run as one: the losses of both, the state at the end."""
    return [
        (before + after, state) for (before, _), (after, state) in zip(first, rest, strict=True)
    ]


def _make_steps_as_another_rank(job: Job, folder: Path) -> list[tuple[list[float], str]]:
    """The same steps twice in one process, which changes its rank in between."""
    device = torch.device("cpu")
    found = []
    for generation in range(2):
        trainer = Trainer(job, build_mesh(job, device), device)
        losses = [trainer.train_step().loss.item() for _ in range(2)]
        found.append((losses, f"{dist.get_rank()} {digest(trainer)}"))
        trainer.close()
        if generation == 0:
            rank, world = dist.get_rank(), dist.get_world_size()
            dist.destroy_process_group()
            store = dist.FileStore(str(folder / "again"), world)
            dist.init_process_group("gloo", store=store, rank=(rank + 1) % world, world_size=world)
    return found


def test_a_process_that_was_another_rank_before_makes_the_same_steps(tmp_path: Path) -> None:
    """torch knows meshes by their ranks: it must not take the old one's blocks for ours."""
    job = job_on(4, {"pipeline": 2}, tmp_path)
    results = run_ranks(4, _make_steps_as_another_rank, job, tmp_path)
    first, second = ([found[generation] for found in results] for generation in range(2))
    assert sorted(first) == sorted(second)


def _continue_with_new_buckets(job: Job) -> tuple[str, str]:
    """The state after five steps, and after three steps in one trainer and two in another."""
    device = torch.device("cpu")
    whole, other = (Trainer(job, build_mesh(job, device), device) for _ in range(2))
    for step in range(5):
        if step == 3:
            kept = {name: tensor.clone() for name, tensor in whole.tensors().items()}
            other.cursor, other.step = whole.cursor, whole.step
        whole.train_step()
    for name, tensor in other.tensors().items():
        tensor.copy_(kept[name])
    other.publish_weights()
    for _ in range(2):
        other.train_step()
    return digest(whole), digest(other)


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_replicas_add_up_in_the_same_order_after_a_new_start(compute: str) -> None:
    """DDP arranges its buckets anew after its first step."""
    sections = {
        "parallel": {"data": 3, "zero": 0},
        "precision": {"compute": compute},
        "train": {"steps": 5, "global_batch": 12, "deterministic": True},
    }
    job = make_job(3, sections)
    for whole, continued in run_ranks(3, _continue_with_new_buckets, job):
        assert whole == continued
