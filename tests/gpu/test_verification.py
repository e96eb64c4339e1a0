"""On CUDA a micro-batch gives the same bits again, in any process, while the rest runs as usual."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.config import job_from_table, resolve
from phalanx.parallel import build_mesh
from phalanx.parallel.gradient_sums import deterministic_kernels
from phalanx.train.trainer import Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

RANKS, FLIPS, PASSES = 3, 6, 4
MODEL = {"dim": 512, "layers": 2, "heads": 8, "kv_heads": 4, "ffn": 1024, "vocab": 1024}
MOE = {"experts": 8, "top_k": 2, "ffn": 256, "shared_experts": 1, "balance": "bias"}
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "dense": {"model": MODEL},
    "experts": {"model": {**MODEL, "moe": MOE}},
    "fp8": {"model": MODEL, "precision": {"compute": "bfloat16", "fp8": True}},
}


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("compiled", ["off", "on"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_repeat_to_the_bit_between_ordinary_steps(
    case: str, compiled: str, group: None
) -> None:
    table: dict[str, Any] = {
        "data": {"sequence": 512, "prefetch": 0},
        "train": {"steps": 40, "global_batch": 4, "micro_batch": 4, "compile": compiled},
        **CASES[case],
    }
    job, device = resolve(job_from_table(table), 1), torch.device("cuda", 0)
    trainer = Trainer(job, build_mesh(job, device), device)
    batches = trainer.feed.next(trainer.cursor).micro_batches
    weight = torch.full((), 1 / 2048, device=device)
    found: list[list[Tensor]] = []
    for _ in range(PASSES):
        trainer.engine.run(batches, weight, trainer.timer)  # with the kernels of every day
        assert not torch.are_deterministic_algorithms_enabled()
        trainer.engine.clear_gradients()
        with deterministic_kernels(device):
            trainer.engine.run(batches, weight, trainer.timer)
        found.append([each.gradient.clone() for each in trainer.engine.weights])
        trainer.engine.clear_gradients()
    trainer.close()
    for again in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], again, strict=True))
    assert any(gradient.count_nonzero() for gradient in found[0])


@pytest.mark.parametrize("case", ["dense", "experts"])
def test_ranks_that_share_a_gpu_verify_each_other(case: str, tmp_path: Path) -> None:
    sections = {
        **CASES[case],
        "data": {"sequence": 512},
        "precision": {"compute": "bfloat16"},
        "train": {"steps": 40, "global_batch": 4 * RANKS, "micro_batch": 2, "compile": "off"},
    }
    arguments = [str(RANKS), str(tmp_path), str(FLIPS), json.dumps(sections)]
    command = [sys.executable, "-m", "tests.gpu.verified_ranks"]
    ranks = [
        subprocess.Popen([*command, str(rank), *arguments], stderr=subprocess.PIPE)
        for rank in range(RANKS)
    ]
    try:
        ends = [rank.communicate(timeout=300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for number, (rank, (_, complaints)) in enumerate(zip(ranks, ends, strict=True)):
        assert rank.returncode == 0, complaints.decode()[-4000:]
        made = json.loads((tmp_path / f"found-{number}.json").read_text())
        assert made["named"] == [[culprit] for culprit in made["culprits"]]
        assert len(made["named"]) == FLIPS and made["alarms"] == 0
