"""Trains a shrunken job on one process and on every mesh, and compares what comes out."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import torch
from msgspec import Struct
from torch import Tensor
from torch.distributed.tensor import DTensor

from phalanx.checkpoint import Checkpointer, latest
from phalanx.config import ConfigError, Job
from phalanx.config.errors import did_you_mean
from phalanx.parallel import build_mesh
from phalanx.parallel.collectives import UnknownParameterError
from phalanx.train.parity.meshes import Candidate, candidates, on_one_process
from phalanx.train.parity.ranks import RankError, run_group
from phalanx.train.parity.shrink import shrunken
from phalanx.train.trainer import Trainer

# Sums in another order differ by 3e-7: in so few steps no mistake may hide behind much more.
LOSS_TOLERANCE = 5e-6
NORM_TOLERANCE = 1e-5
WEIGHT_TOLERANCE = 1e-3  # of the way that a parameter went: Adam enlarges what rounding left

Weights = dict[str, Tensor]


class StepNumbers(Struct, frozen=True, array_like=True):
    """What a step says of itself."""

    loss: float
    grad_norm: float


class Reference(Struct, frozen=True, kw_only=True):
    """What one process comes to."""

    steps: list[StepNumbers]  # and the one after those that are compared
    start: Weights
    weights: Weights  # after the steps that are compared


class MeshComparison(Struct, frozen=True, kw_only=True):
    """Greatest relative differences of a mesh, or of a checkpoint's way to another one."""

    mesh: str
    ranks: int
    source: str = ""  # the mesh whose checkpoint it continues; "": none
    loss: float = 0.0
    grad_norm: float = 0.0
    weights: float = 0.0  # of the way that the parameter went
    parameter: str = ""  # the one that differs most
    refused: str = ""  # the rule against it
    error: str = ""  # what a rank raised

    @property
    def same(self) -> bool:
        """Whether it trains as one process does."""
        within = self.loss <= LOSS_TOLERANCE and self.grad_norm <= NORM_TOLERANCE
        return not self.refused and not self.error and within and self.weights <= WEIGHT_TOLERANCE

    @property
    def differs(self) -> bool:
        """Whether it runs, and comes to something else."""
        return not self.same and not self.refused


def train(job: Job) -> list[tuple[float, float]]:
    """Loss and gradient norm of every step, on this rank of the group or alone."""
    trainer = make_trainer(job)
    numbers = make_steps(trainer, job.train.steps)
    trainer.close()
    return [(step.loss, step.grad_norm) for step in numbers]


def prove(
    job: Job,
    ranks: int,
    steps: int,
    *,
    reshard: bool,
    seen: Callable[[MeshComparison], None],
    only: Sequence[str] = (),
) -> list[MeshComparison]:
    """Every mesh of up to so many ranks against one process; ``seen`` is told of each at once.

    With ``reshard`` also a checkpoint of each mesh on each other. ``only``: some meshes, by name.
    """
    small = shrunken(job, steps + 1)
    meshes = _chosen(candidates(small, ranks), only)
    reference = make_reference(on_one_process(small), steps)
    comparisons: list[MeshComparison] = []
    with tempfile.TemporaryDirectory(prefix="phalanx-parity-") as folder:
        for mesh in meshes:
            saved = Path(folder) / mesh.name if reshard else None
            comparisons.append(compare(mesh, reference, steps, saved))
            seen(comparisons[-1])
        if reshard:
            sound = {one.mesh for one in comparisons if one.same}
            proved = [mesh for mesh in meshes if mesh.name in sound]
            for mesh in proved:
                for one in continue_all(mesh, proved, Path(folder), reference, steps):
                    comparisons.append(one)
                    seen(one)
    return comparisons


def _chosen(meshes: list[Candidate], only: Sequence[str]) -> list[Candidate]:
    names = [mesh.name for mesh in meshes]
    for name in only:
        if name not in names:
            raise ConfigError("--mesh", name, "no such mesh", did_you_mean(name, names))
    return [mesh for mesh in meshes if not only or mesh.name in only]


def make_reference(job: Job, steps: int) -> Reference:
    """Train on this one process."""
    trainer = make_trainer(job)
    start = {name: value.clone() for name, value in whole_weights(trainer)}
    numbers = make_steps(trainer, steps)
    weights = {name: value.clone() for name, value in whole_weights(trainer)}
    numbers += make_steps(trainer, 1)
    trainer.close()
    return Reference(steps=numbers, start=start, weights=weights)


def compare(
    mesh: Candidate, reference: Reference, steps: int, saved: Path | None = None
) -> MeshComparison:
    """A mesh against one process. Its checkpoint is left at ``saved``."""
    if mesh.refused:
        return MeshComparison(mesh=mesh.name, ranks=mesh.ranks, refused=mesh.refused)

    def run() -> list[MeshComparison]:
        trainer = make_trainer(mesh.job)
        numbers = make_steps(trainer, steps)
        found = _compared(mesh, trainer, numbers, reference.steps[:steps], reference)
        if saved is not None:
            Checkpointer(saved).save(trainer.step, trainer.tensors(), trainer.extra())
        trainer.close()
        return [found]

    return _on_ranks(mesh, run)[0]


def continue_all(
    mesh: Candidate, sources: Sequence[Candidate], folder: Path, reference: Reference, steps: int
) -> list[MeshComparison]:
    """The checkpoint of each source continues on a mesh: the same weights, then the same step."""

    def run() -> list[MeshComparison]:
        trainer = make_trainer(mesh.job)
        found = []
        for source in sources:
            place = folder / source.name
            path = latest(place)
            assert path is not None
            trainer.restore(Checkpointer(place).load(path, trainer.tensors()))
            before = _compared(mesh, trainer, [], [], reference)
            numbers = make_steps(trainer, 1)
            after = _compared(mesh, trainer, numbers, reference.steps[steps:], None)
            found.append(
                msgspec.structs.replace(
                    before, source=source.name, loss=after.loss, grad_norm=after.grad_norm
                )
            )
        trainer.close()
        return found

    return _on_ranks(mesh, run)


def make_trainer(job: Job) -> Trainer:
    """Of a resolved job, on a CPU."""
    device = torch.device("cpu")
    return Trainer(job, build_mesh(job, device), device)


def make_steps(trainer: Trainer, count: int) -> list[StepNumbers]:
    """Train on; what each step says of itself."""
    outcomes = [trainer.train_step() for _ in range(count)]
    return [StepNumbers(one.loss.item(), one.grad_norm.item()) for one in outcomes]


def whole_weights(trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    """Every parameter that this rank has a part of, whole; its own copy where there are several."""
    for weight in trainer.engine.weights:
        value = weight.like(weight.master)
        yield weight.name, value.full_tensor() if isinstance(value, DTensor) else value


def _compared(
    mesh: Candidate,
    trainer: Trainer,
    numbers: Sequence[StepNumbers],
    expected: Sequence[StepNumbers],
    reference: Reference | None,
) -> MeshComparison:
    """Of one rank; ``reference`` where weights are compared, too."""
    pairs = list(zip(numbers, expected, strict=True))
    worst, parameter = 0.0, ""
    for name, value in whole_weights(trainer) if reference is not None else ():
        assert reference is not None
        way = (reference.weights[name] - reference.start[name]).norm().item()
        off = (value - reference.weights[name]).norm().item() / max(way, 1e-12)
        if not off <= worst:
            worst, parameter = off, name
    return MeshComparison(
        mesh=mesh.name,
        ranks=mesh.ranks,
        loss=max((_off(one.loss, other.loss) for one, other in pairs), default=0.0),
        grad_norm=max((_off(one.grad_norm, other.grad_norm) for one, other in pairs), default=0.0),
        weights=worst,
        parameter=parameter,
    )


def _off(value: float, expected: float) -> float:
    difference = abs(value - expected) / max(abs(expected), 1e-12)
    return difference if difference == difference else float("inf")  # NaN is no agreement


def _on_ranks(mesh: Candidate, run: Callable[[], list[MeshComparison]]) -> list[MeshComparison]:
    """Run on every rank of a mesh; of what they found, the worst. Refusals are results."""

    def attempt() -> bytes:
        # It warns that whole weights take two gathers, which is no step of training.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        try:
            return msgspec.msgpack.encode(run())
        except (ConfigError, UnknownParameterError) as error:
            refusal = MeshComparison(mesh=mesh.name, ranks=mesh.ranks, refused=str(error))
            return msgspec.msgpack.encode([refusal])

    try:
        answers = run_group(mesh.ranks, attempt)
    except RankError as error:
        last = str(error).strip().rpartition("\n")[2]
        return [MeshComparison(mesh=mesh.name, ranks=mesh.ranks, error=last)]
    ranks = [msgspec.msgpack.decode(answer, type=list[MeshComparison]) for answer in answers]
    return [_worst(found) for found in zip(*ranks, strict=True)]


def _worst(found: Sequence[MeshComparison]) -> MeshComparison:
    """What ranks found of the same thing, as one."""
    most = max(found, key=lambda one: one.weights)
    return msgspec.structs.replace(
        most,
        loss=max(one.loss for one in found),
        grad_norm=max(one.grad_norm for one in found),
        refused=next((one.refused for one in found if one.refused), ""),
    )
