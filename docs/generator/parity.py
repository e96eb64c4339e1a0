"""Families of models on meshes, as `tests/train/parity/test_families.py` proved them last."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from docs.generator.markdown import code, table
from phalanx.config import PRESETS

STORE = Path(__file__).with_name("parity.json")

# What [model] has for each family: a preset, and what of the published model it leaves out.
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama 3": {"preset": "llama3.1-8b"},
    "Mistral": {"preset": "mistral-7b"},
    "Qwen2.5": {"preset": "qwen2.5-7b"},
    "Qwen3": {"preset": "qwen3-8b"},
    "SmolLM3": {"preset": "smollm3-3b"},
    "Gemma 2": {"preset": "gemma2-9b"},
    "Gemma 3": {"preset": "gemma3-27b"},
    "OLMo 2": {"preset": "olmo2-7b"},
    "OLMo 3": {"preset": "olmo3-7b"},
    "Mixtral": {"preset": "mixtral-8x7b"},
    "gpt-oss": {"preset": "gpt-oss-20b"},
    "Qwen2-MoE": {"preset": "qwen2-moe-57b-a14b"},
    "Qwen3-MoE": {"preset": "qwen3-moe-30b-a3b"},
    "DeepSeek-V3": {"preset": "deepseek-v3", "moe.groups": 8, "moe.top_groups": 4},
    "DeepSeek-V3 with MTP": {"preset": "deepseek-v3", "mtp.layers": 1},
}
MESHES = (
    *("ddp2", "zero1-2", "zero2-2", "fsdp2", "tp2", "cp2-ring", "cp2-ulysses"),
    *("pp2-1f1b", "pp2-interleaved", "pp2-zero-bubble"),
    *("fsdp4", "hsdp2x2", "fsdp2xtp2", "fsdp2xcp2-ulysses", "cp2xtp2-ring"),
    *("pp2xddp2", "pp2xfsdp2", "pp2xtp2"),
)
EXPERT_MESHES = ("fsdp2xep2", "tp2xep2", "fsdp4xep2", "fsdp2xtp2xep2", "pp2xfsdp2xep2")
PROVED, UNPROVED, NOT_THERE = "=", "?", "—"


class FamilyProof(Struct, frozen=True, kw_only=True):
    """What came out for a family."""

    date: str
    commit: str
    steps: int
    meshes: dict[str, str]  # the rule against each; "": it trains as one process does
    reshards: int  # checkpoints of one of them that another one continued; 0: not tried
    loss: float  # greatest relative differences
    grad_norm: float
    weights: float


def meshes_of(family: str) -> tuple[str, ...]:
    """The meshes that a family is tried on."""
    sparse = PRESETS[FAMILIES[family]["preset"]].moe is not None
    return MESHES + EXPERT_MESHES if sparse else MESHES


def read() -> dict[str, FamilyProof]:
    """What is stored, by family."""
    if not STORE.exists():
        return {}
    found = msgspec.json.decode(STORE.read_bytes(), type=dict[str, FamilyProof])
    return {family: found[family] for family in FAMILIES if family in found}


def record(family: str, proof: FamilyProof) -> None:
    """Store what came out for one more family."""
    proofs = {**read(), family: proof}
    ordered = {name: proofs[name] for name in FAMILIES if name in proofs}
    STORE.write_bytes(msgspec.json.format(msgspec.json.encode(ordered), indent=1) + b"\n")


def lines() -> list[str]:
    """The page."""
    proofs = read()
    rules = list(dict.fromkeys(r for p in proofs.values() for r in p.meshes.values() if r))
    rows = [
        [code(mesh), *(_cell(family, mesh, proofs, rules) for family in FAMILIES)]
        for mesh in MESHES + EXPERT_MESHES
    ]
    notes = [f"{number}. {rule}" for number, rule in enumerate(rules, 1)]
    return [
        f"`{PROVED}`: loss, gradient norm and weights are those of one process. A number: refused, "
        f"by the rule below. `{UNPROVED}`: not proved yet. `{NOT_THERE}`: a mesh for experts.",
        "",
        *table(["mesh", *FAMILIES], rows),
        "",
        *notes,
        "",
        "Checkpoints: where it was tried, each proved mesh saved one, and each of them continued "
        "each. Greatest relative differences (weights: of the way that a parameter went):",
        "",
        *table(
            ["family", "model", "checkpoints", "loss", "gradient norm", "weights", "proved"],
            [_summary(family, proof) for family, proof in proofs.items()],
        ),
    ]


def _cell(family: str, mesh: str, proofs: dict[str, FamilyProof], rules: Sequence[str]) -> str:
    if mesh not in meshes_of(family):
        return NOT_THERE
    proof = proofs.get(family)
    if proof is None or mesh not in proof.meshes:
        return UNPROVED
    rule = proof.meshes[mesh]
    return str(rules.index(rule) + 1) if rule else PROVED


def _summary(family: str, proof: FamilyProof) -> list[str]:
    settings = ", ".join(f"{key} = {value}" for key, value in FAMILIES[family].items())
    numbers = (proof.loss, proof.grad_norm, proof.weights)
    return [
        family,
        code(settings),
        f"{proof.reshards} ways" if proof.reshards else "not tried",
        *(f"{number:.1e}" for number in numbers),
        f"{proof.date}, {code(proof.commit)}",
    ]
