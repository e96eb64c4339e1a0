"""Recipes that cannot be followed are refused with the reason and what to change."""

from __future__ import annotations

import pytest

from tests.config.rules.test_job import problems

BIASED = '{experts=4, top_k=2, ffn=32, first_dense_layers=1, balance="bias-auxiliary"}'
FROZEN = '[{pattern="layers.1.moe*", freeze=true}]'

# world size, overrides, key, part of the rule, part of the fix
REFUSED: list[tuple[int, list[str], str, str, str]] = [
    (
        *(1, ["model.z_loss_coefficient=1e-4", "model.loss=a:B"], "model.z_loss_coefficient"),
        *("part of our own loss", "set it to 0"),
    ),
    (1, ["model.qk_clip=100", "model.qk_norm=true"], "model.qk_clip", "takes their scale", "false"),
    (
        *(1, ["model.qk_clip=100", "model.attention_softcap=50"], "model.qk_clip"),
        *("bounds them already", "set it to 0"),
    ),
    (1, ["model.qk_clip=100", "model.module=a:B"], "model.qk_clip", "our own attention", '""'),
    (
        *(1, ["model.qk_clip=100", "memory.offload=optimizer"], "model.qk_clip"),
        *("host memory", 'memory.offload = "none"'),
    ),
    (1, ["model.dropout=0.1", "model.module=a:B"], "model.dropout", "our own blocks", "0"),
    (1, ["model.dropout=0.1", "preference.kind=dpo"], "model.dropout", "two of them", "0"),
    (
        *(2, ["model.qk_clip=100", "parallel.context=2", "parallel.context_method=ring"]),
        *("parallel.context_method", "needs the largest scores", "ulysses"),
    ),
    (
        *(1, ["train.ema={decay=0.9}", "memory.offload=optimizer"], "train.ema"),
        *("updated on the device", '"none"'),
    ),
    *(
        (1, ["optimizer.kind=schedule-free", *others], "optimizer.kind", rule, fix)
        for others, rule, fix in (
            ([], "averages instead of decaying", 'set schedule.kind = "constant"'),
            (["schedule.kind=constant", "optimizer.state=int8"], "first moment", "float32"),
            (["schedule.kind=constant", "train.ema={}"], "an average", 'train.ema = "none"'),
            (["schedule.kind=constant", "model.qk_clip=9"], "scales one", "model.qk_clip = 0"),
            (["schedule.kind=constant", "optimizer.beta1=0"], "near its average", "0.9"),
            (["schedule.kind=constant", "memory.offload=parameters"], "on the device", "none"),
        )
    ),
    (
        *(1, [f"model.moe={BIASED}", f"optimizer.groups={FROZEN}"], "model.moe.bias_rate"),
        *("moving the selection bias of routers that a group freezes", "set it to 0"),
    ),
    (
        *(1, ["schedule.kind=linear", "schedule.decay_steps=5"], "schedule.decay_steps"),
        *("no meaning", "leave it out"),
    ),
    (
        *(1, ["schedule.kind=linear", "schedule.steps=5", "schedule.warmup_steps=6"]),
        *("schedule.warmup_steps", "at most schedule.steps (5)", "nearest: 5"),
    ),
    (
        *(1, ['schedule.extensions=[{at_step=50, kind="wsd"}]']),
        *("schedule.extensions[0].decay_steps", "wsd ends with a decay", "try 5"),
    ),
    (
        *(1, ["schedule.extensions=[{at_step=50}, {at_step=50}]"]),
        *("schedule.extensions[1].at_step", "must be above 50", "sort them"),
    ),
    (
        *(1, ["schedule.extensions=[{at_step=90, warmup_steps=20}]"]),
        *("schedule.extensions[0].warmup_steps", "up to what follows (10)", "nearest: 10"),
    ),
]


@pytest.mark.parametrize(("world_size", "overrides", "key", "rule", "fix"), REFUSED)
def test_the_reason_and_the_fix_are_named(
    world_size: int, overrides: list[str], key: str, rule: str, fix: str
) -> None:
    (found,) = [one for one in problems(world_size, *overrides) if one.key == key]
    assert rule in found.rule
    assert fix in found.fix


@pytest.mark.parametrize("section", ["adapter.kind=lora", "preference.kind=dpo", "model.mtp={}"])
def test_what_is_not_proved_together_is_refused(section: str) -> None:
    overrides = ["train.ema={}", "model.qk_clip=9", "model.z_loss_coefficient=1", section]
    unproved = {one.key for one in problems(1, *overrides) if "is not proved with" in one.rule}
    assert unproved == {"train.ema", "model.qk_clip", "model.z_loss_coefficient"}


def test_a_balance_loss_over_batches_needs_one() -> None:
    moe = "model.moe={experts=4, top_k=2, ffn=32, balance='bias', auxiliary_over='batch'}"
    (found,) = problems(1, moe)
    assert found.key == "model.moe.auxiliary_over" and "has no loss" in found.rule
    assert problems(1, moe.replace("'bias'", "'bias-auxiliary'")) == []


@pytest.mark.parametrize("world_size", [1, 2])
def test_recipes_that_go_together_are_accepted(world_size: int) -> None:
    overrides = [
        "model.qk_clip=100",
        "model.z_loss_coefficient=1e-4",
        "model.attention_sinks=true",
        "train.ema={decay=0.99, every=10}",
        "schedule.extensions=[{at_step=200}]",
        f"parallel.context={world_size}",
    ]
    assert problems(world_size, *overrides) == []
