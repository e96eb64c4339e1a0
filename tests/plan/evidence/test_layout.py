"""Mappings of rows: replicas of shards, batches that follow, and what a blank cell means."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.plan.evidence.fields import offload, recompute, zero
from phalanx.plan.evidence.layout import NO_RECOMPUTE, OTHER_BATCH, OTHER_DATA
from phalanx.plan.evidence.published import PublishedRun, parse_runs
from tests.plan.evidence.test_published import ROW


def one(**changed: str) -> PublishedRun:
    runs, skipped = parse_runs([ROW | changed])
    assert not skipped
    return runs[0]


@pytest.mark.parametrize(
    ("changed", "zero_level", "replicas"),
    [
        ({"zero_fsdp": "FSDP"}, 3, 1),
        ({"zero_fsdp": "FSDP2"}, 3, 1),
        ({"zero_fsdp": "HSDP"}, 3, 8),
        ({"zero_fsdp": "HYBRID_SHARD"}, 3, 8),
        ({"zero_fsdp": "HSDP 4x16"}, 3, 4),
        ({"zero_fsdp": "FSDP16"}, 3, 4),
        ({"zero_fsdp": "2D: 32-way FSDP x 2 pods"}, 3, 2),
        ({"zero_fsdp": "FSDP", "dp_replicate": "2"}, 3, 2),
        ({"zero_fsdp": "NO_SHARD"}, 0, 1),
    ],
)
def test_hsdp_is_zero_3_with_replicas(
    changed: dict[str, str], zero_level: int, replicas: int
) -> None:
    mapping = one(**changed).mapping
    assert (mapping.zero, mapping.replicate, mapping.data) == (zero_level, replicas, 64)


def test_a_batch_follows_from_replicas_micro_batch_and_accumulation() -> None:
    assert one(global_batch="", ga="2").workload.global_batch == 128
    run = one(microbatch="", global_batch="256", gradient_accumulation="2")
    assert run.mapping.micro_batch == 2 and run.complete
    without_gpus = one(num_gpus="", global_batch="", ga="4")
    assert without_gpus.mapping.gpus == 64 and without_gpus.workload.global_batch == 256


def test_a_micro_batch_that_does_not_follow_is_not_guessed() -> None:
    runs, (skipped,) = parse_runs([ROW | {"microbatch": "", "global_batch": "96", "ga": "1"}])
    assert not runs and "global_batch / (dp * ga)" in skipped.reason


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"dp": "32"}, OTHER_DATA),
        ({"ga": "7"}, OTHER_BATCH),
        ({"recompute": "not stated"}, NO_RECOMPUTE),
        ({"recompute": ""}, NO_RECOMPUTE),
    ],
)
def test_what_cells_contradict_or_leave_open_is_told(
    changed: dict[str, str], sentence: str
) -> None:
    assert one(**changed).assumed == (sentence,)
    assert not one().assumed


@pytest.mark.parametrize("text", ["", "not stated", "Not published", "unspecified", "unknown"])
def test_recompute_that_nobody_stated_is_unknown(text: str) -> None:
    run = one(recompute=text)
    assert not run.recompute_known
    assert one(recompute="none").recompute_known and recompute("none") == "none"


@pytest.mark.parametrize(
    ("changed", "offloaded"),
    [
        ({"zero_fsdp": "ZeRO-3 offload"}, "optimizer"),
        ({"zero_fsdp": "ZeRO-Infinity, stage 3"}, "parameters-nvme"),
        ({"offload": "optimizer states to CPU"}, "optimizer"),
        ({"cpu_offload": "activations"}, "activations"),
        ({"offload": "parameters-nvme+activations"}, "parameters-nvme+activations"),
        ({"offload": "none"}, "none"),
    ],
)
def test_offload_is_read_from_its_column_and_beside_the_sharding(
    changed: dict[str, Any], offloaded: str
) -> None:
    assert one(**changed).mapping.offload == offloaded


def test_words_for_sharding_and_offload() -> None:
    assert [zero(text) for text in ("HSDP", "_HYBRID_SHARD_ZERO2", "DDP", "ZeRO-1")] == [3, 2, 0, 1]
    assert offload("no offload") == "" and offload("FULL_SHARD") == ""
