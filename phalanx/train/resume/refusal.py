"""What only this machine can say about a job: packages, disk, files, corpus.

Needs no torch, so that ``phalanx config check`` answers as fast as it does for settings alone.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import msgspec

from phalanx.checkpoint import Manifest, read_manifest
from phalanx.config import (
    Adapter,
    ConfigError,
    Job,
    Model,
    Train,
    model_differences,
    problem,
    refuse_other_sums,
    stage_at,
    stage_jobs,
)
from phalanx.config.errors import written
from phalanx.data import refuse_unreadable
from phalanx.hardware import count_cuda
from phalanx.plan.cost.failures import rate_named
from phalanx.train.report import run_folder
from phalanx.train.report.trackers import check_available
from phalanx.train.resume.parent import find_parent

log = logging.getLogger(__name__)

SUMS = ("virtual_replicas", "micro_batch")  # settings of a run that decide the order of its sums


def refuse(job: Job, *, begins: bool = True) -> None:
    """Raise ``ConfigError`` where a resolved job cannot start on this machine.

    Not ``begins``: it goes on, and a disk that is full just now may have room when it matters.
    """
    refuse_platform()
    check_available(job)
    refuse_device(job)
    refuse_rate(job)
    if begins:
        run_folder.check_free_space(job)
    refuse_files(job)


def refuse_platform() -> None:
    """Raise ``ConfigError`` where ranks cannot run at all."""
    if sys.platform != "linux":
        rule = "ranks fork, and keep snapshots in memory, in ways that only Linux has"
        fix = "start it on Linux, in a container or in WSL; planning works here too"
        raise ConfigError("platform", f'"{sys.platform}"', rule, fix)


def refuse_device(job: Job) -> None:
    """Raise ``ConfigError`` for what would be silently without effect on a CPU."""
    if job.parallel.async_tensor and job.train.device == "auto" and not count_cuda():
        rule = "overlaps through CUDA's symmetric memory, and this machine has no CUDA device"
        raise ConfigError("parallel.async_tensor", True, rule, "set it to false")


def refuse_rate(job: Job) -> None:
    """Raise ``ConfigError`` for a failure rate that a run would miss only when it plans saves."""
    named = job.checkpoint.failure_rate
    try:
        rate_named(named)
    except ConfigError as error:
        (found,) = error.problems
        key = "checkpoint.failure_rate"
        raise ConfigError(key, f'"{named}"', found.rule, found.fix) from None


def refuse_files(job: Job) -> None:
    """Raise ``ConfigError`` where what a resolved job starts from or reads is not there."""
    if (parent := find_parent(job)) is not None:
        refuse_parent(job, parent)
    if job.checkpoint.load_hf:
        refuse_weights(job)
    for stage in stage_jobs(job):
        refuse_unreadable(stage.job.data, job.model.vocab)
        if job.train.validate_every:
            refuse_unreadable(stage.job.data, job.model.vocab, "validation")


def refuse_parent(job: Job, parent: Path) -> None:
    """Raise ``ConfigError`` where a checkpoint to resume holds another model than the job's."""
    manifest = read_manifest(parent)
    if not job.checkpoint.weights_only:
        refuse_state_of(job, manifest.config, str(parent))
    try:
        refuse_model_of(job, manifest, str(parent))
    except ConfigError as error:
        if not (tensors := differing_tensors(job.model, parent)):
            raise
        rule = "\n  ".join([f"{len(tensors)} tensors are not the model's:", *tensors])
        fix = "correct the settings above, or start from another checkpoint"
        shown = problem("checkpoint.resume", str(parent), rule, fix)
        raise ConfigError.of([*error.problems, shown]) from None


def refuse_state_of(job: Job, config: dict[str, Any], where: str) -> None:
    """Raise ``ConfigError`` for moments in a format that cannot be turned into the job's, and where
    virtual replicas would go on with sums in another order.
    """
    refuse_other_adapter(job, config, where)
    refuse_other_optimizer(job, config, where)
    refuse_other_mean(job, config, where)
    before = {name: config.get("train", {}).get(name, 0) for name in SUMS}
    refuse_other_sums(job, Train(**before), where)
    theirs, ours = config.get("optimizer", {}).get("state", "float32"), job.optimizer.state
    if theirs != ours and "int8" in (theirs, ours):
        rule = f"the moments of {where} are {theirs}, and 8-bit ones are not converted"
        fix = f'set it to "{theirs}", or take the weights alone (checkpoint.weights_only = true)'
        raise ConfigError("optimizer.state", f'"{ours}"', rule, fix)


def refuse_other_adapter(job: Job, config: dict[str, Any], where: str) -> None:
    """Raise ``ConfigError`` for a run that would go on with other adapters than it has."""
    ours, theirs = job.adapter, msgspec.convert(config.get("adapter", {}), Adapter)
    for name in ours.__struct_fields__:
        here, there = getattr(ours, name), getattr(theirs, name)
        if here != there and (name == "kind" or ours.kind != "none"):
            rule = f"the run in {where} has {written(there)}"
            fix = "set it to that, or begin anew from its weights (checkpoint.weights_only = true)"
            raise ConfigError(f"adapter.{name}", written(here), rule, fix)


def refuse_other_optimizer(job: Job, config: dict[str, Any], where: str) -> None:
    """Raise ``ConfigError`` where an optimizer would go on with the state of another one."""
    if "optimizer" not in config:
        return  # of weights that no run trained
    theirs = config["optimizer"].get("kind", "adamw")
    modules = (job.optimizer.module, config["optimizer"].get("module", ""))
    if any(modules):
        key, ours, before = "optimizer.module", *modules
    else:
        key, ours, before = "optimizer.kind", job.optimizer.kind, theirs
    if ours == before:
        return
    anew = "begin anew from its weights (checkpoint.weights_only = true)"
    if theirs == "schedule-free":
        anew = "begin anew from an export of their mean (`phalanx convert export-hf`) by load_hf"
    rule = f"the run in {where} has {written(before)}, whose state no other optimizer takes"
    raise ConfigError(key, written(ours), rule, f"set it to {written(before)}, or {anew}")


def refuse_other_mean(job: Job, config: dict[str, Any], where: str) -> None:
    """Raise ``ConfigError`` where Schedule-Free AdamW would take its weights for another mean."""
    theirs, ours = config.get("optimizer", {}), job.optimizer
    if theirs.get("kind") != "schedule-free" or ours.kind != "schedule-free":
        return
    if (before := theirs.get("beta1", ours.beta1)) != ours.beta1:
        rule = f"the weights in {where} lie between its sequences by {before}"
        fix = f"set it to {before}, which a Schedule-Free run keeps to its end"
        raise ConfigError("optimizer.beta1", ours.beta1, rule, fix)


def refuse_adapted_weights(config: dict[str, Any], where: str) -> None:
    """Raise ``ConfigError`` where taking the weights alone would lose what adapters learned."""
    if config.get("adapter", {}).get("kind", "none") != "none":
        rule = f"the weights in {where} have adapters, which would be left out"
        fix = "merge them first with `phalanx convert merge`, and start from that"
        raise ConfigError("checkpoint.weights_only", "true", rule, fix)


def refuse_trained_mean(config: dict[str, Any], where: str) -> None:
    """Raise ``ConfigError`` where taking the weights alone would leave out what makes them those
    that were validated.
    """
    if config.get("optimizer", {}).get("kind") == "schedule-free":
        rule = f"the weights in {where} are those that Schedule-Free AdamW trains, not their mean"
        fix = "export the mean with `phalanx convert export-hf`, and start from that by load_hf"
        raise ConfigError("checkpoint.weights_only", "true", rule, fix)


def refuse_model_of(job: Job, manifest: Manifest, where: str) -> None:
    """Raise ``ConfigError`` where a checkpoint's settings are those of another model."""
    if job.checkpoint.weights_only:
        refuse_adapted_weights(manifest.config, where)
        refuse_trained_mean(manifest.config, where)
    last_sample = max(0, manifest.cursor.seen - 1)  # a stage may begin with the next one
    if (described := manifest.config.get("model")) is None:
        words = "%s does not say of which model its weights are: only their shapes are compared"
        log.warning(words, where)
        return
    try:
        theirs = msgspec.convert(described, Model)
        if manifest.config.get("train", {}).get("sequence_stages"):
            theirs = stage_at(msgspec.convert(manifest.config, Job), last_sample).model
    except msgspec.ValidationError as error:
        rule = f"its model cannot be read ({error}): a later version may have written it"
        fix = "use that version, or start from another checkpoint"
        raise ConfigError("checkpoint.resume", f'"{where}"', rule, fix) from None
    ours = stage_at(job, 0 if job.checkpoint.weights_only else last_sample)
    _refuse_model(ours, theirs, where)


def differing_tensors(model: Model, parent: Path) -> list[str]:
    """Every tensor of a checkpoint that a model has not, or has in another shape, and vice versa.

    Imports torch: that is worth its second where something is wrong.
    """
    if model.module:
        return []  # its code is imported in ranks alone
    import torch

    from phalanx.checkpoint import stored_tensors
    from phalanx.model import Transformer

    with torch.device("meta"):
        ours = Transformer(model)
    biases = (each for each in ours.named_buffers() if each[0].endswith(".expert_bias"))
    held = [*ours.named_parameters(), *biases]
    wanted = {f"model.{name}": tuple(tensor.shape) for name, tensor in held}
    stored = {name: tuple(shape) for name, (shape, _) in stored_tensors(parent).items()}
    tensors = {}
    for name in sorted({n for n in stored if n.startswith("model.")} | wanted.keys()):
        if stored.get(name) != wanted.get(name):
            theirs = stored.get(name, "is not in the checkpoint")
            tensors[name] = f"{name} {theirs}, the model has {wanted.get(name, 'none')}"
    # An optimizer's tensors are named after their weights and shaped like them.
    followers = {n: f"model.{n.split('.', 2)[-1]}" for n in stored if n.startswith("optimizer.")}
    lines = [f"{name} {stored[name]}, as {of}" for name, of in followers.items() if of in tensors]
    return [*tensors.values(), *sorted(lines)]


def refuse_weights(job: Job) -> None:
    """Raise ``ConfigError`` where the model in ``checkpoint.load_hf`` is not the job's."""
    from phalanx.model.hf.config import config_from_hf
    from phalanx.model.hf.files import HfError

    folder = Path(job.checkpoint.load_hf)
    try:
        theirs = config_from_hf(folder)
    except HfError as error:
        fix = "name a folder with config.json and safetensors files"
        raise ConfigError("checkpoint.load_hf", f'"{folder}"', error.problem, fix) from None
    if not any(folder.glob("*.safetensors")):
        fix = "download its *.safetensors files too"
        raise ConfigError("checkpoint.load_hf", f'"{folder}"', "holds no weights", fix)
    _refuse_model(job, theirs, str(folder))


def _refuse_model(job: Job, theirs: Model, where: str) -> None:
    """Refuse, or where that is allowed say, every setting of the job's model that is not theirs."""
    allowed = job.checkpoint.allow_other_model
    problems = []
    for each in model_differences(job.model, theirs):
        if each.is_shape:
            rule = f"the weights in {where} have another shape"
            problems.append(problem(each.key, each.ours, rule, f"set it to {each.theirs}"))
        elif allowed:
            words = "%s = %s, and the weights in %s were trained with %s: as allowed"
            log.warning(words, each.key, each.ours, where, each.theirs)
        else:
            rule = f"the weights in {where} were trained with {each.theirs}"
            fix = f"set it to {each.theirs}, or checkpoint.allow_other_model = true to change it"
            problems.append(problem(each.key, each.ours, rule, fix))
    if problems:
        raise ConfigError.of(problems)
