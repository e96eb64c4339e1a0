"""The software behind a row: its columns first, then what its source is known for."""

from __future__ import annotations

import csv
from importlib import resources

import pytest

from phalanx.plan.evidence.published import PublishedRun, parse_runs
from phalanx.plan.evidence.sources import UNKNOWN_STACK, source_facts
from phalanx.plan.stacks import STACKS, TRAITS
from tests.plan.evidence.test_published import ROW


def one(**changed: str) -> PublishedRun:
    runs, skipped = parse_runs([ROW | changed])
    assert not skipped, skipped
    return runs[0]


def test_columns_name_the_software_and_its_traits() -> None:
    run = one(stack="TorchTitan", fused="no", reduce_bytes="2")
    assert (run.software.name, run.software.fused, run.software.reduce_bytes) == (
        *("torchtitan", False),
        2,
    )
    assert run.project == "TorchTitan"


def test_a_source_fills_only_what_the_row_leaves_blank() -> None:
    source = "pytorch/torchtitan benchmarks"
    assert one(source=source).software == STACKS["torchtitan"]
    assert one(source=source).memory_kind == "reserved"
    assert not one(source=source, notes="eager").software.fused
    stated = one(source=source, stack="nanotron", mem_kind="allocated", notes="async TP")
    assert (stated.software.name, stated.memory_kind) == ("nanotron", "allocated")
    assert stated.software.overlap_tensor


def test_software_that_nobody_named_is_typical_and_says_so() -> None:
    assert one().software.name == "" and not one().assumed
    assert one(stack="Colossal-AI").assumed == (UNKNOWN_STACK,)


def test_forced_balance_is_a_stated_assumption() -> None:
    experts = {"experts": "8", "topk": "2"}
    assert one(**experts).workload.routing_skew == 0.6
    assert one(**experts, routing="balanced").workload.routing_skew == 0.0
    assert one(**experts, notes="MoE force-balanced").workload.routing_skew == 0.0
    runs, (skipped,) = parse_runs([ROW | experts | {"routing": "random"}])
    assert not runs and "neither balanced nor real" in skipped.reason


def test_a_release_has_fused_experts_where_its_notes_say_so() -> None:
    release = "NVIDIA-NeMo/Megatron-Bridge docs/performance-summary-archive.md [{} NeMo Container]"
    row = {"gpu": "GB200", "precision": "MXFP8", "experts": "8", "topk": "2"}

    def fused(version: str, **changed: str) -> bool:
        return one(source=release.format(version), **(row | changed)).software.fused_experts

    assert fused("26.06", model="Qwen3_30B_a3B") and fused("26.06", model="GPT OSS 120B")
    assert not fused("26.06.01", model="GPT OSS 120B")  # known issue
    assert not fused("26.04", model="Qwen3_30B_a3B")
    assert not fused("26.06", model="Qwen3_30B_a3B", precision="bf16")
    assert not fused("26.06", model="Qwen3_30B_a3B", gpu="H100-80G-SXM", precision="FP8")


def test_a_sweep_that_gave_the_embedding_a_layers_place_is_read_so() -> None:
    bloom = "bigscience-workshop/bigscience train/tr11-176B-ml/chronicles-prequel.md line 900 [{}]"

    def counts(section: str, model: str = "GPT-195B") -> bool:
        return one(source=bloom.format(section), model=model).software.counts_ends

    assert counts("Rebalancing layers") and counts("Re-do")
    assert not counts("48 node contenders") and not counts("Re-do", "GPT-182B")


def test_scripts_that_compile_nothing_are_not_fused() -> None:
    source = "Lightning-AI/litgpt tutorials/resource-tables.md [Finetuning with LoRA on 1 GPU]"
    assert not one(source=source).software.fused


@pytest.mark.parametrize(
    ("changed", "reason"),
    [({"fused": "perhaps"}, "fused"), ({"counted_flops": "all"}, "unknown count of FLOPs")],
)
def test_traits_that_cannot_be_meant_are_skipped(changed: dict[str, str], reason: str) -> None:
    runs, (skipped,) = parse_runs([ROW | changed])
    assert not runs and reason in skipped.reason


def test_every_fact_sets_columns_that_are_read_and_concerns_a_row() -> None:
    columns = {"project", "stack", "counted_flops", "attention_flops", "routing", "trains"}
    text = resources.files("phalanx.plan").joinpath("data/published_runs.csv").read_text("utf-8")
    rows = list(csv.DictReader(text.splitlines()))
    for fact in source_facts():
        assert fact.set.keys() <= {*columns, "mem_kind", *TRAITS}
        assert "nanotron" in fact.source or any(fact.holds(row) for row in rows)
