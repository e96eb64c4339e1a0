"""`phalanx parity`: meshes that train alike are proved, and one that does not is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from phalanx.config import PRESETS, Job, check, job_from_table
from phalanx.train.parity.meshes import Candidate, candidates, on_one_process
from phalanx.train.parity.prove import MeshComparison, compare, make_reference, prove
from phalanx.train.parity.shrink import shrunken

ROOT = Path(__file__).parents[3]
STEPS = 2
WRONG = """
from phalanx.model import Declaration, declare
from torch import nn
import torch
from conv_block import ConvBlock, SquaredMlp

class ShiftedMlp(SquaredMlp):
    def __init__(self, dim, ffn):
        super().__init__(dim, ffn)
        self.shift = nn.Parameter(torch.empty(dim))
        declare(self, shift=Declaration())

    def forward(self, x):  # every rank adds it, and the sum has it twice
        return super().forward(x) + self.shift

class WrongBlock(ConvBlock):
    def __init__(self, config, index):
        super().__init__(config, index)
        self.mlp = ShiftedMlp(config.dim, config.ffn)

class UndeclaredBlock(ConvBlock):
    def __init__(self, config, index):
        super().__init__(config, index)
        self.gain = nn.Parameter(torch.empty(config.dim))
"""


def own_job(*files: Path, module: str = "conv_block:ConvBlock") -> Job:
    code = [str(ROOT / "examples" / "own_model" / "conv_block.py"), *map(str, files)]
    model = {"dim": 64, "layers": 2, "heads": 4, "ffn": 64, "vocab": 64, "mlp": "relu2"}
    table: dict[str, Any] = {"code": {"files": code}, "model": {**model, "module": module}}
    return job_from_table(table)


def on_meshes(job: Job, *names: str) -> list[MeshComparison]:
    small = shrunken(job, STEPS + 1)
    reference = make_reference(on_one_process(small), STEPS)
    meshes = {mesh.name: mesh for mesh in candidates(small, 2)}
    return [compare(meshes[name], reference, STEPS) for name in names]


def test_the_example_trains_alike_on_meshes_and_is_refused_where_tokens_would_miss_others() -> None:
    found = on_meshes(own_job(), "tp2", "fsdp2", "pp2-1f1b", "cp2-ulysses")
    assert [one.same for one in found] == [True, True, True, False]
    assert "splits_sequence" in found[-1].refused and not found[-1].differs
    assert all(one.weights > 0 for one in found[:2])  # they were compared


def test_a_wrong_plan_is_found_and_an_undeclared_parameter_refused(tmp_path: Path) -> None:
    file = tmp_path / "wrong_blocks.py"
    file.write_text(WRONG, encoding="utf-8")
    (wrong,) = on_meshes(own_job(file, module="wrong_blocks:WrongBlock"), "tp2")
    assert wrong.differs and wrong.grad_norm > 1e-3
    undeclared = own_job(file, module="wrong_blocks:UndeclaredBlock")
    refused, sharded = on_meshes(undeclared, "tp2", "fsdp2")
    assert "layers.0.gain" in refused.refused and sharded.same


def test_checkpoints_of_each_mesh_continue_on_each_other() -> None:
    table = {"model": {"preset": "tiny"}, "train": {"device": "cpu"}}
    seen: list[MeshComparison] = []
    found = prove(
        job_from_table(table),
        2,
        1,
        reshard=True,
        seen=seen.append,
        only=("tp2", "pp2-1f1b"),
    )
    assert found == seen and all(one.same for one in found)
    ways = {(one.source, one.mesh) for one in found if one.source}
    assert ways == {(a, b) for a in ("tp2", "pp2-1f1b") for b in ("tp2", "pp2-1f1b")}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_shrinks_to_a_job_with_its_forms(name: str) -> None:
    job = shrunken(job_from_table({"model": {"preset": name}}), STEPS)
    check(on_one_process(job), 1)
    full, small = PRESETS[name], job.model
    for form in ("moe", "latent", "window", "rope_scaling"):
        assert (getattr(full, form) is None) == (getattr(small, form) is None), form
    assert small.mlp == full.mlp and small.norm == full.norm
    runnable = [mesh for mesh in candidates(job, 4) if not mesh.refused]
    assert len(runnable) >= 12


def test_meshes_have_names_of_their_own_and_use_all_ranks() -> None:
    job = shrunken(job_from_table({"model": {"preset": "tiny-moe"}}), STEPS)
    meshes: list[Candidate] = candidates(job, 4)
    assert len({mesh.name for mesh in meshes}) == len(meshes)
    for mesh in meshes:
        axes = mesh.job.parallel
        assert axes.pipeline * axes.data * axes.context * axes.tensor == mesh.ranks
    names = {mesh.name for mesh in meshes}
    assert {"ddp2", "zero2-2", "fsdp4", "hsdp2x2", "tp4", "pp2xtp2", "fsdp2xep2"} <= names
