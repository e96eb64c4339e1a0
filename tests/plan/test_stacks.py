"""Training software by name, by its traits, or unnamed."""

from __future__ import annotations

import pytest

from phalanx.config import ConfigError
from phalanx.plan.stacks import STACKS, stack_of, typical_software
from phalanx.plan.workload import Mapping, Software

USUAL = Software()


def test_a_stack_is_a_name_traits_or_both() -> None:
    assert stack_of("", USUAL) == USUAL and USUAL.name in STACKS
    assert stack_of("megatron", USUAL) == STACKS["megatron"]
    changed = stack_of("megatron, fused=false, reduce_bytes=2", USUAL)
    assert (changed.name, changed.fused, changed.reduce_bytes) == ("megatron", False, 2)
    assert stack_of("attention=flash2", USUAL).name == USUAL.name


def test_unnamed_software_has_usual_traits_and_no_name() -> None:
    assert stack_of("unnamed,fused=false", USUAL) == Software(name="", fused=False)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("megatrom", "no such stack"),
        ("megatron,nemo", "names two"),
        ("fast=true", "no such trait"),
        ("name=megatron", "no such trait"),
        ("fused=perhaps", "fused"),
        ("attention=flash9", "attention"),
        ("least_fragmented=-3", "least_fragmented"),
        ("activation_share=nan", "activation_share"),
        ("logit_bytes=1e30", "logit_bytes"),
        ("gradient_bytes=0", "gradient_bytes"),
    ],
)
def test_a_stack_that_does_not_exist_is_refused_with_a_way_out(text: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule) as refused:
        stack_of(text, USUAL)
    assert refused.value.problems[0].fix


def test_typical_traits_follow_gpus_and_sharding() -> None:
    sharded = typical_software("hopper", Mapping(zero=3))
    split = typical_software("hopper", Mapping(zero=1))
    early = typical_software("ampere", Mapping(zero=1, precision="float16", recompute="full"))
    assert not sharded.fused and split.overlap_tensor and early.attention == "unfused"
    assert {sharded.name, split.name, early.name} == {""}
