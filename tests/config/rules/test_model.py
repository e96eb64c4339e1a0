"""Forms of blocks: what makes no model is refused, and what an axis cannot split."""

from __future__ import annotations

import pytest

from phalanx.config import Job, job_from_table, resolve
from tests.config.rules.test_job import problems

WINDOW = "model.window.size=64"
OVER_ALL = ["model.qk_norm=true", "model.qk_norm_over=all"]
MTP = "model.mtp.layers=1"
LATENT = ["model.latent={}", "model.kv_heads=8"]

# world size, overrides, key, part of the rule, part of the fix
REFUSED: list[tuple[int, list[str], str, str, str]] = [
    (
        2,
        [WINDOW, "parallel.context=2", "parallel.context_method=ring"],
        "parallel.context_method",
        "model.window needs the nearest tokens",
        "ulysses",
    ),
    (
        2,
        ["model.attention_softcap=50", "parallel.context=2", "parallel.context_method=ring"],
        "parallel.context_method",
        "model.attention_softcap changes the softmax",
        "ulysses",
    ),
    (
        2,
        ["model.attention_sinks=true", "parallel.context=2", "parallel.context_method=ring"],
        "parallel.context_method",
        "model.attention_sinks changes the softmax",
        "ulysses",
    ),
    (
        2,
        [*OVER_ALL, "parallel.tensor=2"],
        "parallel.tensor",
        "every head of a token",
        "nearest: 1",
    ),
    (
        2,
        [MTP, "parallel.pipeline=2", "parallel.schedule=zero-bubble"],
        "parallel.schedule",
        "splits backward in two",
        "interleaved",
    ),
    (1, ["model.qk_norm_over=all"], "model.qk_norm_over", "no norm", "model.qk_norm = true"),
    (1, [WINDOW, "model.window.full_every=1"], "model.window.full_every", "no layer", "none"),
    (
        1,
        ["model.rotary_fraction=0.2"],
        "model.rotary_fraction",
        "rotates 3 of 16",
        "nearest: 0.125",
    ),
    (1, [*LATENT, WINDOW], "model.window", "grouped-query", "leave it out"),
    (1, [*LATENT, "model.nope_every=2"], "model.nope_every", "grouped-query", "leave it out"),
    (1, [*LATENT, "model.attention_bias=true"], "model.attention_bias", "grouped-query", "leave"),
    (1, [*LATENT, "model.attention_sinks=true"], "model.attention_sinks", "grouped-query", "leave"),
    (
        1,
        ["model.rope_scaling.kind=yarn", "model.rope_scaling.slow_rotations=40"],
        "model.rope_scaling.slow_rotations",
        "below fast_rotations",
        "1.0 and 32.0",
    ),
]
MOE = [
    (["model.moe.groups=3"], "model.moe.groups", "must divide", "nearest: 2"),
    (["model.moe.groups=8"], "model.moe.groups", "two or more", "nearest: 4"),
    (["model.moe.groups=2", "model.moe.top_groups=3"], "model.moe.top_groups", "at most", "2"),
    (["model.moe.groups=4", "model.moe.top_k=3"], "model.moe.top_groups", "fewer than", "2"),
    (["model.mlp=geglu"], "model.mlp", "experts are swiglu", "swiglu"),
    (["model.moe.shared_gate=true"], "model.moe.shared_gate", "needs shared experts", "= 1"),
]


@pytest.mark.parametrize(("world_size", "overrides", "key", "rule", "fix"), REFUSED)
def test_a_form_that_cannot_be_is_refused(
    world_size: int, overrides: list[str], key: str, rule: str, fix: str
) -> None:
    (found,) = problems(world_size, *overrides)
    assert found.key == key and rule in found.rule and fix in found.fix


@pytest.mark.parametrize(("overrides", "key", "rule", "fix"), MOE)
def test_experts_that_cannot_be_are_refused(
    overrides: list[str], key: str, rule: str, fix: str
) -> None:
    (found,) = problems(1, *overrides, preset="tiny-moe")
    assert found.key == key and rule in found.rule and fix in found.fix


@pytest.mark.parametrize(
    "overrides",
    [
        [WINDOW, "parallel.context=2"],
        ["model.attention_softcap=50", "model.logit_softcap=30", "parallel.context=2"],
        [WINDOW, "model.window.full_every=4", "parallel.tensor=2"],
        ["model.norm=sandwich", "model.mlp=geglu", "parallel.pipeline=2"],
        [*OVER_ALL, "parallel.context=2"],
        [MTP, "parallel.context=2", "parallel.context_method=ring"],
    ],
)
def test_forms_that_compose_are_accepted(overrides: list[str]) -> None:
    assert problems(2, *overrides) == []


def resolved(*overrides: str) -> Job:
    return resolve(job_from_table({"model": {"preset": "tiny"}}, overrides), 8)


def test_a_window_makes_the_context_axis_split_heads() -> None:
    uneven = ["parallel.context=8"]  # four key/value heads: the ring, where nothing forbids it
    assert resolved(*uneven).parallel.context_method == "ring"
    assert resolved(*uneven, WINDOW).parallel.context_method == "ulysses"
    (found,) = problems(8, *uneven, WINDOW)
    assert found.key == "parallel.context" and "ring" not in found.fix
