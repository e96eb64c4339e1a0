"""Refuses what cannot run, before any process starts, and says what would."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from phalanx.config.errors import ConfigError, ConfigProblem, problem
from phalanx.config.resolve import LEAST_VERIFIED_ZERO, is_gated, resolve
from phalanx.config.rules.accepted import with_accepted_fix
from phalanx.config.rules.backend import backend_problems
from phalanx.config.rules.data import data_problems
from phalanx.config.rules.mesh import mesh_problems
from phalanx.config.rules.model import SHAPE, form_problems, model_problems
from phalanx.config.rules.numbers import nearest_multiple
from phalanx.config.rules.own_code import own_code_problems
from phalanx.config.rules.post_training import post_training_problems
from phalanx.config.rules.recipe import recipe_problems
from phalanx.config.rules.text import text_problems
from phalanx.config.rules.virtual_replicas import virtual_replica_problems
from phalanx.config.schema import STATE_BLOCK, Job
from phalanx.config.stages.ramp import stage_jobs
from phalanx.config.tree import mistakes

MOST_MICRO_BATCH_TOKENS = 2**31 - 1


def check(job: Job, world_size: int) -> None:
    """Raise ``ConfigError`` with every reason why this job cannot run on so many ranks."""
    problems = mistakes(Job, msgspec.to_builtins(job))
    if problems:
        raise ConfigError.of(problems)
    problems = _problems(job, world_size)
    if problems:
        tried = (with_accepted_fix(p, job, world_size, problems, _problems) for p in problems)
        raise ConfigError.of(tried)


def _problems(job: Job, world_size: int) -> list[ConfigProblem]:
    job = resolve(job, world_size)
    problems = list(model_problems(job.model))
    # Rules between the axes and the model read its shape: without one they only mislead.
    if all(getattr(job.model, name) for name in SHAPE):
        problems += mesh_problems(job, world_size)
        problems += virtual_replica_problems(job, world_size)
        problems += form_problems(job)
        problems += _precision(job)
    problems += backend_problems(job.backend)
    for rules in (
        text_problems,
        data_problems,
        own_code_problems,
        post_training_problems,
        _memory,
        _optimizer,
        recipe_problems,
        _train,
        _evaluate,
        _verification,
        _start,
    ):
        problems += rules(job)
    return problems + _stage_problems(job, world_size, problems)


def _stage_problems(job: Job, world_size: int, before: list[ConfigProblem]) -> list[ConfigProblem]:
    """What only holds in later stages of the run, whose samples have another length."""
    problems = []
    for number, stage in enumerate(stage_jobs(job)[1:]):
        for each in _problems(stage.job, world_size):
            if all((each.key, each.rule) != (known.key, known.rule) for known in before):
                key = f"in train.sequence_stages[{number}], {each.key}"
                problems.append(msgspec.structs.replace(each, key=key, tries=()))
    return problems


def _precision(job: Job) -> Iterator[ConfigProblem]:
    precision = job.precision
    if precision.compute == "float16" and not job.optimizer.skip_non_finite:
        yield problem(
            "optimizer.skip_non_finite",
            False,
            "float16 finds its loss scale by skipping steps that overflow",
            'set it to true, or precision.compute to "bfloat16"',
        )
    if not precision.fp8:
        return
    if precision.compute != "bfloat16":
        yield problem(
            "precision.compute",
            f'"{precision.compute}"',
            "fp8 layers compute in bfloat16 around them",
            'set it to "bfloat16"',
        )
    for key, size in _fp8_sizes(job).items():
        if size % 16:
            yield problem(
                key,
                size,
                "fp8 needs every matrix side on a rank to be a multiple of 16",
                f"nearest: {nearest_multiple(size, 16)}, or set precision.fp8 = false",
            )


def _fp8_sizes(job: Job) -> dict[str, int]:
    model, tensor = job.model, job.parallel.tensor
    tokens = job.train.micro_batch * job.data.sequence // job.parallel.context
    sizes = {"model.dim": model.dim, "train.micro_batch * data.sequence / parallel.context": tokens}
    if model.latent is None:
        sizes["model.heads * model.head_dim / parallel.tensor"] = (
            model.heads * model.head_dim // tensor
        )
        sizes["model.kv_heads * model.head_dim / parallel.tensor"] = (
            model.kv_heads * model.head_dim // tensor
        )
    if model.moe is None or model.moe.first_dense_layers:
        sizes["model.ffn / parallel.tensor"] = model.ffn // tensor
    return sizes


def _memory(job: Job) -> Iterator[ConfigProblem]:
    if job.memory.offload == "parameters" and job.parallel.zero == 0:
        yield problem(
            "memory.offload",
            '"parameters"',
            "needs sharding (parallel.zero >= 1)",
            'set parallel.zero = 3, or memory.offload = "optimizer"',
        )
    folder = f'"{job.memory.offload_folder}"'
    if job.memory.offload_folder and job.memory.offload != "optimizer":
        rule = "takes the optimizer's state, and nothing else"
        fix = 'set memory.offload = "optimizer", or leave it out'
        yield problem("memory.offload_folder", folder, rule, fix)
    elif job.memory.offload_folder and (job.optimizer.kind != "adamw" or job.optimizer.module):
        rule = "AdamW alone has its state in a file"
        yield problem("memory.offload_folder", folder, rule, 'set optimizer.kind = "adamw"')


def _state_blocks(job: Job) -> Iterator[ConfigProblem]:
    """Tensor parallelism cuts the rows of attention's output and of the MLP's."""
    model, tensor = job.model, job.parallel.tensor
    rows = {"model.heads * model.head_dim": model.heads * model.head_dim}
    if model.moe is None or model.moe.first_dense_layers:
        rows["model.ffn"] = model.ffn
    for name, row in rows.items():
        if row % STATE_BLOCK == 0 and row // tensor % STATE_BLOCK:
            yield problem(
                "optimizer.state",
                '"int8"',
                f"keeps blocks of {STATE_BLOCK} in a row whole, and parallel.tensor = {tensor} "
                f"cuts through those of {name} = {row}",
                'lower parallel.tensor, or set optimizer.state = "bfloat16"',
            )


def _optimizer(job: Job) -> Iterator[ConfigProblem]:
    if job.optimizer.state == "int8":
        yield from _state_blocks(job)
    if 0 < job.optimizer.spike_factor <= 1:
        yield problem(
            "optimizer.spike_factor",
            job.optimizer.spike_factor,
            "must be 0 (off) or above 1: norms vary around their mean, and it would skip "
            "ordinary steps",
            "nearest: 2.0; 10.0 is usual",
        )


def _train(job: Job) -> Iterator[ConfigProblem]:
    train = job.train
    batches = {"train.global_batch": train.global_batch}
    before = 0
    for number, stage in enumerate(train.batch_ramp):
        key = f"train.batch_ramp[{number}]"
        batches[f"{key}.global_batch"] = stage.global_batch
        if stage.until_tokens <= before:
            rule = f"must be above {before}, where the stage before it ends"
            fix = "sort the stages by until_tokens; train.global_batch follows the last"
            yield problem(f"{key}.until_tokens", stage.until_tokens, rule, fix)
        before = max(before, stage.until_tokens)
    key, least = min(batches.items(), key=lambda one: one[1])
    if train.micro_batch > least:
        rule = f"must be at most {key} ({least})"
        yield problem("train.micro_batch", train.micro_batch, rule, f"nearest: {least}")
    tokens = job.train.micro_batch * job.data.sequence
    if tokens > MOST_MICRO_BATCH_TOKENS:
        yield problem(
            "train.micro_batch",
            job.train.micro_batch,
            f"with data.sequence = {job.data.sequence} a forward pass would hold {tokens:,} "
            f"tokens, and kernels count at most {MOST_MICRO_BATCH_TOKENS:,}",
            f"nearest: {max(1, MOST_MICRO_BATCH_TOKENS // job.data.sequence)}",
        )
    traced = job.log.profile_steps
    if traced and not 0 <= traced[0] < traced[1] <= job.train.steps:
        yield problem(
            "log.profile_steps",
            list(traced),
            f"must be [first, last) within train.steps ({job.train.steps}), first below last",
            f"nearest: [0, {min(3, job.train.steps)}]",
        )


def _evaluate(job: Job) -> Iterator[ConfigProblem]:
    named = "tasks" if job.evaluate.tasks else "perplexity" if job.evaluate.perplexity else ""
    if job.evaluate.every and not named:
        rule = "nothing is named that could be scored"
        fix = "set evaluate.tasks or evaluate.perplexity"
        yield problem("evaluate.every", job.evaluate.every, rule, fix)
    if named and not job.evaluate.every:
        rule = "is never scored while evaluate.every is 0"
        fix = "set evaluate.every to a number of steps"
        yield problem(f"evaluate.{named}", list(getattr(job.evaluate, named)), rule, fix)


def _verification(job: Job) -> Iterator[ConfigProblem]:
    axes, every = job.parallel, job.train.verify_every
    if every <= 0:
        return
    for axis in ("tensor", "pipeline", "context", "expert"):
        if (size := getattr(axes, axis)) > 1:
            yield problem(
                "train.verify_every",
                every,
                f"has every rank compute a whole micro-batch of another, and with parallel.{axis} "
                f"= {size} a rank computes a part of one",
                f"set it to 0, or parallel.{axis} = 1",
            )
    if axes.zero < LEAST_VERIFIED_ZERO:
        yield problem(
            "train.verify_every",
            every,
            "compares what each micro-batch hands to the reduce-scatter, and parallel.zero = "
            f"{axes.zero} has none for each",
            "set it to 0, or parallel.zero = 3",
        )


def _start(job: Job) -> Iterator[ConfigProblem]:
    start = job.checkpoint
    if start.load_hf and start.resume:
        yield problem(
            "checkpoint.load_hf",
            f'"{start.load_hf}"',
            "a run starts from imported weights or from a checkpoint, not both",
            "leave out checkpoint.resume or checkpoint.load_hf",
        )
    if start.weights_only and not start.resume:
        yield problem(
            "checkpoint.weights_only",
            "true",
            "needs a checkpoint to take the weights from",
            'set checkpoint.resume to one, or to "auto"',
        )
    if start.load_hf and not is_gated(job.model):
        yield problem(
            "checkpoint.load_hf",
            f'"{start.load_hf}"',
            "no layout that is read has an MLP without a gate",
            "leave it out",
        )
