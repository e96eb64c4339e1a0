"""Refuses recipes that contradict themselves, or that some other setting cannot carry out."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.config.errors import ConfigProblem, problem, written
from phalanx.config.resolve import has_balance_loss, has_expert_bias, parameter_group
from phalanx.config.schema import Job, Schedule, ScheduleExtension
from phalanx.config.stages.ramp import schedule_span


def recipe_problems(job: Job) -> Iterator[ConfigProblem]:
    """Every reason why a resolved job's recipe cannot be followed."""
    yield from _unproved_pairs(job)
    yield from _losses(job)
    yield from _dropout(job)
    yield from _qk_clip(job)
    yield from _average(job)
    yield from _width(job)
    yield from _frozen_routers(job)
    yield from _schedule_free(job)
    yield from _schedule(job)
    yield from _sequence_stages(job)


def _unproved_pairs(job: Job) -> Iterator[ConfigProblem]:
    """What is proved for all weights, trained to predict the next token, and for nothing else."""
    asked = {
        "train.ema": (job.train.ema is not None, "none"),
        "train.sequence_stages": (bool(job.train.sequence_stages), []),
        "model.qk_clip": (job.model.qk_clip > 0, 0),
        "model.z_loss_coefficient": (job.model.z_loss_coefficient > 0, 0),
        "model.width_base": (job.model.width_base > 0, 0),
        "optimizer.kind": (job.optimizer.kind == "schedule-free", "adamw"),
    }
    sections = {"adapter.kind": job.adapter.kind, "preference.kind": job.preference.kind}
    others = [f'{section} = "{kind}"' for section, kind in sections.items() if kind != "none"]
    if job.model.mtp is not None:
        others.append("model.mtp")
        asked["train.virtual_replicas"] = (job.train.virtual_replicas > 0, 0)
    for other in others:
        for key, (is_set, off) in asked.items():
            if is_set:
                yield problem(key, "", f"is not proved with {other}", f"set it to {written(off)}")


def _losses(job: Job) -> Iterator[ConfigProblem]:
    model = job.model
    if model.z_loss_coefficient and model.loss:
        yield problem(
            "model.z_loss_coefficient",
            model.z_loss_coefficient,
            "is part of our own loss, and model.loss names another",
            "set it to 0, and add the square of the log-sum-exp to that loss",
        )
    if model.moe and model.moe.auxiliary_over == "batch" and not has_balance_loss(model.moe):
        yield problem(
            "model.moe.auxiliary_over",
            '"batch"',
            f'model.moe.balance = "{model.moe.balance}" has no loss',
            'leave it out, or set model.moe.balance to "auxiliary" or "bias-auxiliary"',
        )


def _dropout(job: Job) -> Iterator[ConfigProblem]:
    model = job.model
    if not model.dropout:
        return
    if model.module:
        rule = "is dropped by our own blocks, and model.module names others"
        yield problem("model.dropout", model.dropout, rule, "set it to 0")
    if job.preference.kind != "none":
        rule = "would make other scores of each pass, and preferences compare two of them"
        yield problem("model.dropout", model.dropout, rule, "set it to 0")


def _qk_clip(job: Job) -> Iterator[ConfigProblem]:
    model = job.model
    if not model.qk_clip:
        return
    refused = (
        (
            model.qk_norm,
            "scales the weights of queries and keys, and model.qk_norm takes their scale away",
            "model.qk_norm = false",
        ),
        (
            model.attention_softcap > 0,
            "needs the scores themselves, and model.attention_softcap bounds them already",
            "model.attention_softcap = 0",
        ),
        (
            bool(model.module),
            "knows the queries and keys of our own attention, not those of model.module",
            'model.module = ""',
        ),
        (
            job.memory.offload != "none",
            "scales weights on the device, and memory.offload keeps them in host memory",
            'memory.offload = "none"',
        ),
    )
    for applies, rule, other in refused:
        if applies:
            yield problem("model.qk_clip", model.qk_clip, rule, f"set it to 0, or {other}")


def _average(job: Job) -> Iterator[ConfigProblem]:
    if job.train.ema is not None and job.memory.offload != "none":
        yield problem(
            "train.ema",
            "",
            "is updated on the device, and memory.offload keeps the weights in host memory",
            'set it to "none", or memory.offload = "none"',
        )


def _width(job: Job) -> Iterator[ConfigProblem]:
    model = job.model
    if not model.width_base:
        return
    refused = (
        (
            model.tied_embedding,
            "scales the head with the width and not the embedding, and they are one matrix",
            "model.tied_embedding = false",
        ),
        (
            bool(job.optimizer.module),
            "scales AdamW's rate, and does not know how optimizer.module steps",
            'optimizer.module = ""',
        ),
    )
    for applies, rule, other in refused:
        if applies:
            yield problem("model.width_base", model.width_base, rule, f"set it to 0, or {other}")


def _frozen_routers(job: Job) -> Iterator[ConfigProblem]:
    model, moe = job.model, job.model.moe
    if moe is None or not has_expert_bias(moe) or not moe.bias_rate:
        return
    for layer in range(moe.first_dense_layers, model.layers):
        group = parameter_group(job.optimizer, f"layers.{layer}.moe.router.weight")
        if group is not None and group.freeze:
            rule = "would go on moving the selection bias of routers that a group freezes"
            fix = f'set it to 0, or have the pattern "{group.pattern}" leave routers out'
            yield problem("model.moe.bias_rate", moe.bias_rate, rule, fix)
            return


def _schedule_free(job: Job) -> Iterator[ConfigProblem]:
    if job.optimizer.kind != "schedule-free":
        return
    refused = (
        (
            job.schedule.kind != "constant" or bool(job.schedule.extensions),
            "averages instead of decaying the rate",
            'schedule.kind = "constant" without extensions; a warmup is fine',
        ),
        (job.optimizer.beta1 == 0, "takes gradients near its average", "optimizer.beta1 = 0.9"),
        (
            job.optimizer.state != "float32",
            "keeps weights where AdamW keeps its first moment",
            'optimizer.state = "float32"',
        ),
        (job.train.ema is not None, "is an average of weights itself", 'train.ema = "none"'),
        (
            job.model.qk_clip > 0,
            "has several sequences of weights, and QK-clip scales one",
            "model.qk_clip = 0",
        ),
        (
            job.memory.offload != "none",
            "keeps its state on the device",
            'memory.offload = "none"',
        ),
    )
    for applies, rule, other in refused:
        if applies:
            fix = f'set {other}, or optimizer.kind = "adamw"'
            yield problem("optimizer.kind", '"schedule-free"', rule, fix)


def _schedule(job: Job) -> Iterator[ConfigProblem]:
    schedule, steps = job.schedule, job.train.steps
    where = "schedule.steps" if schedule.steps else "train.steps"
    yield from _curve("schedule", schedule, schedule_span(schedule, steps), where)
    before = 0
    for number, extension in enumerate(schedule.extensions):
        key = f"schedule.extensions[{number}]"
        if extension.at_step <= before:
            rule = f"must be above {before}, where the curve before it begins"
            yield problem(f"{key}.at_step", extension.at_step, rule, "sort them by at_step")
            return
        before = extension.at_step
        later = schedule.extensions[number + 1 :]
        span = max(1, (later[0].at_step if later else steps) - before)
        yield from _curve(key, extension, span, "the steps up to what follows")


def _sequence_stages(job: Job) -> Iterator[ConfigProblem]:
    train = job.train
    before = max((stage.until_tokens for stage in train.batch_ramp), default=0)
    for number, stage in enumerate(train.sequence_stages):
        if stage.after_tokens <= before:
            ends = "train.batch_ramp ends" if number == 0 else "the stage before it begins"
            yield problem(
                f"train.sequence_stages[{number}].after_tokens",
                stage.after_tokens,
                f"must be above {before}, where {ends}",
                "sort the stages by after_tokens; data.sequence is the length before the first",
            )
        before = max(before, stage.after_tokens)
    if train.sequence_stages and job.parallel.choose:
        yield problem(
            "parallel.choose",
            True,
            "the planner looks at samples of one length, and train.sequence_stages has several",
            "set it to false, and name the axes that the longest samples need",
        )


def _curve(
    key: str, curve: Schedule | ScheduleExtension, span: int, where: str
) -> Iterator[ConfigProblem]:
    if curve.warmup_steps > span:
        yield problem(
            f"{key}.warmup_steps",
            curve.warmup_steps,
            f"must be at most {where} ({span})",
            f"nearest: {span}",
        )
    if curve.kind != "wsd":
        if curve.decay_steps:
            yield problem(
                f"{key}.decay_steps",
                curve.decay_steps,
                f'has no meaning for {key}.kind = "{curve.kind}"',
                f'leave it out, or set {key}.kind = "wsd"',
            )
    elif not curve.decay_steps:
        yield problem(
            f"{key}.decay_steps",
            0,
            "wsd ends with a decay",
            f'try {max(1, span // 10)}, or set {key}.kind = "constant"',
        )
    elif curve.warmup_steps + curve.decay_steps > span >= curve.warmup_steps:
        yield problem(
            f"{key}.decay_steps",
            curve.decay_steps,
            f"warmup and decay together must fit into {where} ({span})",
            f"nearest: {span - curve.warmup_steps}",
        )
