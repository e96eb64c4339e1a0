"""Rules of [adapter], [preference] and [hand_off]: what is not proved is refused."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.config.errors import ConfigProblem, problem
from phalanx.config.resolve import has_balance_loss, has_expert_bias, is_gated
from phalanx.config.schema import MLP_TARGETS, Job

# Matrices that are stored as one: DoRA measures the rows of all of them.
STORED_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def post_training_problems(job: Job) -> Iterator[ConfigProblem]:
    """Everything in the settings of post-training that cannot work."""
    if job.adapter.kind != "none":
        yield from _adapted_model(job)
        yield from _adapter_axes(job)
        yield from _targets(job)
    yield from _pairs(job)
    if job.preference.kind != "none":
        yield from _preference(job)
    if job.hand_off.every:
        yield from _hand_off(job)


def _adapted_model(job: Job) -> Iterator[ConfigProblem]:
    key, value = "adapter.kind", f'"{job.adapter.kind}"'
    reasons = {
        "model.latent": ("latent attention", job.model.latent is not None),
        "model.module": ("layers of your own", bool(job.model.module)),
        "model.mtp": ("multi-token prediction", job.model.mtp is not None),
        "precision.fp8": ("matrices in fp8", job.precision.fp8),
        "train.virtual_replicas": ("virtual replicas", job.train.virtual_replicas > 0),
    }
    for setting, (what, applies) in reasons.items():
        if applies:
            rule = f"is not proved for {what}"
            yield problem(key, value, rule, f'leave out {setting}, or set it to "none"')
    if job.optimizer.kind != "adamw":
        rule = "adapters are updated by AdamW: their matrices are no hidden ones of a model"
        yield problem("optimizer.kind", f'"{job.optimizer.kind}"', rule, 'set it to "adamw"')
    moe = job.model.moe
    if moe is not None and has_expert_bias(moe) and moe.bias_rate > 0:
        rule = "would go on moving the selection bias of a router that is frozen"
        yield problem("model.moe.bias_rate", moe.bias_rate, rule, "set it to 0")


def _adapter_axes(job: Job) -> Iterator[ConfigProblem]:
    axes, adapter_kind = job.parallel, job.adapter.kind
    if axes.expert > 1:
        rule = "adapters are not proved where frozen experts are spread over ranks"
        yield problem("parallel.expert", axes.expert, rule, "set it to 1")
    if adapter_kind == "dora" and axes.tensor > 1:
        rule = "DoRA measures whole rows of matrices, of which a tensor-parallel rank has a part"
        fix = 'set it to 1, or adapter.kind = "lora"'
        yield problem("parallel.tensor", axes.tensor, rule, fix)
    if axes.tensor > 1 and job.model.attention_out_bias and "o_proj" in job.adapter.targets:
        rule = "an adapter on o_proj is not proved beside its bias under tensor parallelism"
        yield problem("parallel.tensor", axes.tensor, rule, "set it to 1, or leave o_proj out")


def _targets(job: Job) -> Iterator[ConfigProblem]:
    key, targets = "adapter.targets", job.adapter.targets
    if not targets:
        yield problem(key, "[]", "nothing would be trained", 'name matrices, e.g. ["q_proj"]')
    if len(set(targets)) < len(targets):
        yield problem(key, list(targets), "names a matrix twice", "name each once")
    if job.model.moe is not None and (wrong := [t for t in targets if t in MLP_TARGETS]):
        rule = f"experts have no adapters ({', '.join(wrong)})"
        fix = 'name those of attention alone: ["q_proj", "k_proj", "v_proj", "o_proj"]'
        yield problem(key, list(targets), rule, fix)
    elif not is_gated(job.model) and "gate_proj" in targets:
        yield problem(key, list(targets), "the MLP has no gate", "leave out gate_proj")
    if job.adapter.kind != "dora":
        return
    for together in STORED_TOGETHER:
        if 0 < sum(name in targets for name in together) < len(together):
            rule = f"{', '.join(together)} are one matrix here, of which DoRA measures every row"
            yield problem(
                key, list(targets), rule, 'name all of them, or set adapter.kind = "lora"'
            )


def _pairs(job: Job) -> Iterator[ConfigProblem]:
    prefers = job.preference.kind != "none"
    if prefers != job.data.pairs:
        fix = 'give both data.pairs = true and preference.kind = "dpo", or none of them'
        rule = "pairs of answers are what preferences are learned from, and nothing else is"
        yield problem("data.pairs", job.data.pairs, rule, fix)
    if job.data.pairs and job.data.source != "shards":
        rule = f'data.source = "{job.data.source}" has no pairs'
        fix = 'set data.source = "shards", and data.path to what `phalanx data preferences` made'
        yield problem("data.pairs", True, rule, fix)
    if job.data.pairs and not job.data.document_mask:
        rule = "an answer would see the other one of its pair"
        yield problem("data.document_mask", False, rule, "set it to true")


def _preference(job: Job) -> Iterator[ConfigProblem]:
    if job.adapter.kind == "none":
        rule = "compares the model with itself without its adapters, and it has none"
        fix = 'set adapter.kind = "lora"'
        yield problem("preference.kind", f'"{job.preference.kind}"', rule, fix)
    for axis in ("pipeline", "context"):
        if (size := getattr(job.parallel, axis)) > 1:
            rule = "DPO compares whole answers, of which a rank of this axis has a part"
            yield problem(f"parallel.{axis}", size, rule, "set it to 1")
    if job.model.loss:
        rule = 'preference.kind = "dpo" is a loss itself'
        yield problem("model.loss", f'"{job.model.loss}"', rule, "leave it out")
    if (moe := job.model.moe) is None:
        return
    losses = {
        "auxiliary_coefficient": moe.auxiliary_coefficient if has_balance_loss(moe) else 0.0,
        "z_loss_coefficient": moe.z_loss_coefficient,
    }
    for name, coefficient in losses.items():
        if coefficient:
            rule = "is a loss of each token, and DPO's are means over pairs of answers"
            yield problem(f"model.moe.{name}", coefficient, rule, "set it to 0")


def _hand_off(job: Job) -> Iterator[ConfigProblem]:
    given = job.hand_off
    if not given.folder:
        rule = "exports need a folder that the engine sees, too"
        yield problem("hand_off.folder", '""', rule, "set it to a folder on a shared disk")
    if job.model.module:
        rule = "layers of your own have no Hugging Face layout to be exported in"
        fix = "leave it out; a callback of your own may hand over weights"
        yield problem("hand_off.every", given.every, rule, fix)
    if given.url and not given.url.startswith(("http://", "https://")):
        rule = "must be an address that takes a POST"
        yield problem("hand_off.url", f'"{given.url}"', rule, 'begin it with "http://"')
