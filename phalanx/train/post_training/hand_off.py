"""Weights for a running engine: a Hugging Face model at a step boundary, and a word about it.

Reinforcement learning samples with an engine of its own; this is what hands it the weights.
"""

from __future__ import annotations

import json
import logging
import shutil
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from phalanx.config import HandOff
from phalanx.model.hf import INDEX_FILE, config_to_hf
from phalanx.model.hf.exchange import exporter, make_readable
from phalanx.model.post_training.adapters import MARK, LowRank, adapters_of, merged
from phalanx.parallel.precision import compute_dtype
from phalanx.train.callback import Callback, TrainingRun
from phalanx.train.trainer import StepOutcome, Trainer

log = logging.getLogger(__name__)

PREFIX = "model."  # of the weights among a trainer's tensors
PATIENCE_SECONDS = 120.0  # that an engine may take to answer
DETAIL = "handed_off_step"  # in the exit report: the last step whose weights the engine has


class WeightHandOff(Callback):
    """Exports the weights every so many steps and tells an engine where they are.

    An export that fails, or an engine that does not answer, is an error in the log and no end of
    the run. Derive from it and define ``tell`` for an engine that is told otherwise.
    """

    def __init__(self, settings: HandOff) -> None:
        self.settings = settings

    def after_step(self, run: TrainingRun, outcome: StepOutcome) -> None:
        if run.step % self.settings.every:
            return
        home = Path(self.settings.folder)
        folder = home / f"step-{run.step:08d}"
        problem = export_weights(run.trainer, folder)
        if run.rank:
            return
        try:
            if problem:
                raise OSError(problem)
            self.tell(run.step, folder)
        except OSError as error:
            log.error("the weights of step %d were not handed off: %s", run.step, error)
            return
        run.details[DETAIL] = run.step
        for old in sorted(home.glob("step-*"))[: -self.settings.keep]:
            shutil.rmtree(old, ignore_errors=True)

    def tell(self, step: int, folder: Path) -> None:
        """Have the engine take over the model in ``folder``; on rank 0. Raises ``OSError``."""
        if not self.settings.url:
            return
        body = json.dumps({"model_path": str(folder.absolute())}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.settings.url, body, headers)
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as answer:
            answer.read()


def export_weights(trainer: Trainer, folder: Path) -> str:
    """Write the weights, adapters merged in, as a Hugging Face folder; collective.

    The first rank of each pipeline stage writes a file. Returns on rank 0 what went wrong, or "".
    """
    mesh, partial = trainer.mesh, folder.with_name(f".{folder.name}.partial")
    stage, stages = mesh.coordinates["pipeline"], mesh.parallel.pipeline
    writes = all(at == 0 for axis, at in mesh.coordinates.items() if axis != "pipeline")
    tensors = gather_weights(trainer, kept=writes)
    name = f"model-{stage + 1:05d}-of-{stages:05d}.safetensors"
    problem = _tried(lambda: _write_file(tensors, partial / name)) if writes else ""
    sizes = {key: each.nbytes for key, each in tensors.items()}
    written = _all_told((name, sizes, problem))
    if mesh.rank:
        return ""
    problems = [each for _, _, each in written if each]
    return problems[0] if problems else _tried(lambda: _complete(trainer, written, partial, folder))


@torch.no_grad()
def gather_weights(trainer: Trainer, *, kept: bool) -> dict[str, Tensor]:
    """This stage's weights in host memory under their Hugging Face names; collective.

    They are those that the optimizer's method evaluates. Ranks that have not ``kept`` them take
    part and return nothing.
    """
    export = exporter(trainer.job.model, compute_dtype(trainer.job.precision))
    tensors, parts = trainer.tensors(), trainer.engine.parts
    state = {n.removeprefix(PREFIX): t for n, t in tensors.items() if n.startswith(PREFIX)}
    adapters = {layer: each for part in parts for layer, each in adapters_of(part).items()}
    found: dict[str, Tensor] = {}
    with trainer.optimizer.evaluated():
        for name in state:
            if MARK not in name:
                whole = _merged_whole(state, adapters, name)
                if kept:
                    found |= export(name, whole)
    return found


def _merged_whole(state: dict[str, Tensor], adapters: dict[str, LowRank], name: str) -> Tensor:
    """One weight in full, with what its adapter adds."""
    whole, layer = _whole(state[name]), name.removesuffix(".weight")
    if layer == name or layer not in adapters:
        return whole
    prefix = layer + MARK
    parts = {n.removeprefix(prefix): _whole(t) for n, t in state.items() if n.startswith(prefix)}
    return merged(whole, adapters[layer].layout, parts)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _write_file(tensors: dict[str, Tensor], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata={"format": "pt"})
    make_readable(path)


def _complete(trainer: Trainer, written: list[Any], partial: Path, folder: Path) -> None:
    """What stands beside the weights; then the folder gets its name."""
    job, dtype = trainer.engine.job, compute_dtype(trainer.job.precision)  # as its stage has it
    placed = {key: name for name, sizes, _ in written for key in sizes}
    total = sum(sum(sizes.values()) for _, sizes, _ in written)
    index = {"metadata": {"total_size": total}, "weight_map": placed}
    (partial / INDEX_FILE).write_text(json.dumps(index, indent=2))
    config = config_to_hf(job.model, dtype, job.data.sequence)
    (partial / "config.json").write_text(json.dumps(config, indent=2))
    shutil.rmtree(folder, ignore_errors=True)  # of a step that is made again after a fault
    partial.rename(folder)


def _tried(write: Callable[[], None]) -> str:
    """What went wrong, which others have to hear of: they are not to wait for this rank."""
    try:
        write()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _all_told(said: tuple[str, dict[str, int], str]) -> list[Any]:
    """What every rank that wrote something says; collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [said]
    heard: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(heard, said)
    return [each for each in heard if each[1]]
