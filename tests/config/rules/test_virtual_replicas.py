"""What virtual replicas do not cover is refused with a sentence, and slots follow them."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.config import ConfigError, Job, check, job_from_table, resolve, virtual_replicas

MODEL = {"dim": 32, "layers": 4, "heads": 4, "ffn": 64, "vocab": 64}


def job_of(ranks: int = 4, **sections: dict[str, Any]) -> Job:
    table: dict[str, Any] = {"model": MODEL, "data": {"sequence": 32}}
    table["train"] = {"virtual_replicas": 4, "global_batch": 8}
    for name, values in sections.items():
        table[name] = {**table.get(name, {}), **values}
    job = resolve(job_from_table(table), ranks)
    check(job, ranks)
    return job


REFUSED: dict[str, tuple[int, dict[str, dict[str, Any]], str]] = {
    "no power of two": (1, {"train": {"virtual_replicas": 6}}, "power of two.*nearest: 4"),
    "too many replicas": (8, {}, "multiple of parallel.data .8."),
    "three replicas": (3, {}, "multiple of parallel.data .3.*start 2 ranks"),
    "batch": (4, {"train": {"virtual_replicas": 16}}, "8 samples.*nearest: 8"),
    "tensor": (4, {"parallel": {"tensor": 2}}, "parallel.tensor = 2 adds up"),
    "context": (4, {"parallel": {"context": 2}}, "parallel.context = 2 adds up"),
    "expert": (
        4,
        {"parallel": {"expert": 2}, "model": {"moe": {"experts": 4, "top_k": 2, "ffn": 32}}},
        "parallel.expert = 2 adds up",
    ),
    "tied-stages": (
        2,
        {"parallel": {"pipeline": 2}, "model": {"tied_embedding": True}},
        "each by itself",
    ),
    "zero-bubble": (
        2,
        {"parallel": {"pipeline": 2, "schedule": "zero-bubble", "zero": 2}},
        "zero-bubble puts them off",
    ),
    "reduce": (4, {"parallel": {"reduce_dtype": "compute"}}, "in fp32"),
    "muon": (4, {"optimizer": {"kind": "muon"}}, "AdamW"),
    "moments": (4, {"optimizer": {"state": "bfloat16"}}, "rounded"),
    "fp8": (4, {"precision": {"fp8": True}}, "fp8 scales"),
    "offload": (4, {"memory": {"offload": "parameters"}}, "host memory"),
    "verify": (4, {"train": {"verify_every": 5}}, "verification"),
    "choose": (4, {"parallel": {"choose": True}}, "planner"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_covered_is_refused(name: str) -> None:
    ranks, sections, words = REFUSED[name]
    with pytest.raises(ConfigError, match=f"train.virtual_replicas = .*{words}"):
        job_of(ranks, **sections)


@pytest.mark.parametrize(
    ("axes", "own"),
    [
        ({"zero": 0}, [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ({"zero": 1}, [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ({"zero": 3}, [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ({"zero": 3, "replicate": 2}, [(0, 2), (1, 3), (4, 6), (5, 7)]),
    ],
)
def test_what_is_summed_together_is_a_sub_tree(
    axes: dict[str, int], own: list[tuple[int, ...]]
) -> None:
    job = job_of(parallel=axes, train={"virtual_replicas": 8})
    found = [virtual_replicas(job, index) for index in range(4)]
    assert [each.own for each in found if each is not None] == own


def test_a_job_without_virtual_replicas_has_none() -> None:
    assert virtual_replicas(job_of(train={"virtual_replicas": 0}), 0) is None
