"""What post-training is not proved for is refused with a sentence."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.config import ConfigError, check, job_from_table

LORA = {"kind": "lora"}
PAIRS = {"source": "shards", "path": "corpus", "pairs": True, "document_mask": True}
DPO = {"adapter": LORA, "preference": {"kind": "dpo"}, "data": PAIRS}
EXPERTS = {"experts": 4, "top_k": 2, "ffn": 32}
ATTENTION = {"kind": "lora", "targets": ["q_proj"]}


def refusals(ranks: int = 1, **sections: dict[str, Any]) -> str:
    model = {"dim": 32, "layers": 4, "heads": 4, "ffn": 64, "vocab": 64}
    table = {**sections, "model": {**model, **sections.get("model", {})}}
    try:
        check(job_from_table(table), ranks)
    except ConfigError as error:
        return str(error)
    return ""


ACCEPTED: dict[str, tuple[int, dict[str, dict[str, Any]]]] = {
    "lora": (1, {"adapter": LORA}),
    "lora-tp": (2, {"adapter": LORA, "parallel": {"tensor": 2}}),
    "lora-pp": (2, {"adapter": LORA, "parallel": {"pipeline": 2}}),
    "lora-cp": (2, {"adapter": LORA, "parallel": {"context": 2}}),
    "dora": (2, {"adapter": {"kind": "dora"}}),
    "dora-attention": (
        1,
        {"adapter": {"kind": "dora", "targets": ["q_proj", "k_proj", "v_proj"]}},
    ),
    "moe": (1, {"adapter": ATTENTION, "model": {"moe": EXPERTS}}),
    "dpo": (1, DPO),
    "dpo-moe": (
        1,
        {**DPO, "adapter": ATTENTION, "model": {"moe": {**EXPERTS, "auxiliary_coefficient": 0.0}}},
    ),
    "hand-off": (1, {"hand_off": {"every": 2, "folder": "out", "url": "http://engine:1/x"}}),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_proved_is_accepted(name: str) -> None:
    ranks, sections = ACCEPTED[name]
    assert refusals(ranks, **sections) == ""


REFUSED: dict[str, tuple[int, dict[str, dict[str, Any]], str]] = {
    "expert": (
        2,
        {"adapter": ATTENTION, "parallel": {"expert": 2}, "model": {"moe": EXPERTS}},
        "parallel.expert = 2: adapters are not proved",
    ),
    "mtp": (
        1,
        {"adapter": {"kind": "lora"}, "model": {"mtp": {"layers": 1}}},
        "is not proved for multi-token prediction",
    ),
    "dpo-pipeline": (2, {**DPO, "parallel": {"pipeline": 2}}, "pipeline = 2: DPO compares whole"),
    "dpo-context": (2, {**DPO, "parallel": {"context": 2}}, "context = 2: DPO compares whole"),
    "dora-tp": (
        2,
        {"adapter": {"kind": "dora"}, "parallel": {"tensor": 2}},
        "parallel.tensor = 2: DoRA measures whole rows",
    ),
    "out-bias": (
        2,
        {"adapter": LORA, "parallel": {"tensor": 2}, "model": {"attention_out_bias": True}},
        "leave o_proj out",
    ),
    "dora-parts": (
        1,
        {"adapter": {"kind": "dora", "targets": ["q_proj", "v_proj"]}},
        "q_proj, k_proj, v_proj are one matrix here",
    ),
    "experts": (1, {"adapter": LORA, "model": {"moe": EXPERTS}}, "experts have no adapters"),
    "bias": (
        1,
        {"adapter": ATTENTION, "model": {"moe": {**EXPERTS, "balance": "bias"}}},
        "model.moe.bias_rate = 0.001: would go on moving",
    ),
    "bias-and-loss": (
        1,
        {"adapter": ATTENTION, "model": {"moe": {**EXPERTS, "balance": "bias-auxiliary"}}},
        "model.moe.bias_rate = 0.001: would go on moving",
    ),
    "dpo-balance": (
        1,
        {**DPO, "adapter": ATTENTION, "model": {"moe": {**EXPERTS, "auxiliary_coefficient": 0.1}}},
        "model.moe.auxiliary_coefficient = 0.1: is a loss of each token",
    ),
    "dpo-router-z": (
        1,
        {**DPO, "adapter": ATTENTION, "model": {"moe": {**EXPERTS, "z_loss_coefficient": 0.1}}},
        "model.moe.z_loss_coefficient = 0.1: is a loss of each token",
    ),
    "no-gate": (1, {"adapter": LORA, "model": {"mlp": "relu2"}}, "the MLP has no gate"),
    "own": (1, {"adapter": LORA, "model": {"module": "a:B"}}, "layers of your own"),
    "muon": (1, {"adapter": LORA, "optimizer": {"kind": "muon"}}, "updated by AdamW"),
    "nothing": (1, {"adapter": {"kind": "lora", "targets": []}}, "nothing would be trained"),
    "twice": (1, {"adapter": {"kind": "lora", "targets": ["q_proj"] * 2}}, "twice"),
    "no-pairs": (1, {**DPO, "data": {}}, "data.pairs = false: pairs of answers"),
    "no-preference": (1, {"data": PAIRS}, "data.pairs = true: pairs of answers"),
    "no-mask": (1, {**DPO, "data": {**PAIRS, "document_mask": False}}, "see the other one"),
    "synthetic": (1, {**DPO, "data": {"pairs": True, "document_mask": True}}, "has no pairs"),
    "no-adapter": (1, {**DPO, "adapter": {}}, 'set adapter.kind = "lora"'),
    "own-loss": (1, {**DPO, "model": {"loss": "a:B"}}, "is a loss itself"),
    "no-folder": (1, {"hand_off": {"every": 2}}, "exports need a folder"),
    "no-url": (1, {"hand_off": {"every": 2, "folder": "x", "url": "engine"}}, "takes a POST"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_proved_is_refused(name: str) -> None:
    ranks, sections, sentence = REFUSED[name]
    assert sentence in refusals(ranks, **sections)
