"""When a device is full, the report says with what, and which key to change."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from phalanx.parallel import build_mesh
from phalanx.train.measure.memory import OPTIMIZER, advice, device_memory_error, memory_breakdown
from phalanx.train.trainer import Trainer
from tests.train.forked_runs import small_job

GIB = 1 << 30
MOSTLY_ACTIVATIONS = {
    "parameters": 2 * GIB,
    "gradients": 2 * GIB,
    OPTIMIZER: 8 * GIB,
    "activations and buffers": 60 * GIB,
    "reserved, unused": 1 * GIB,
    "device": 80 * GIB,
}
MOSTLY_STATE = MOSTLY_ACTIVATIONS | {
    OPTIMIZER: 60 * GIB,
    "activations and buffers": 8 * GIB,
}


def test_activations_are_shrunk_by_micro_batch_and_recompute(tmp_path: Path) -> None:
    job = small_job(tmp_path, 1, train__micro_batch=4)
    words = advice(job, MOSTLY_ACTIVATIONS)
    assert "train.micro_batch from 4 to 2" in words
    assert 'memory.recompute = "selective"' in words


def test_advice_does_not_repeat_what_is_set_already(tmp_path: Path) -> None:
    job = small_job(tmp_path, 1, memory__recompute="full", memory__offload_activations="true")
    words = advice(job, MOSTLY_ACTIVATIONS)
    assert "recompute" not in words and "micro_batch" not in words
    assert "parallel.context" in words


def test_state_is_shrunk_by_sharding_and_offload(tmp_path: Path) -> None:
    words = advice(small_job(tmp_path, 2, parallel__zero=1), MOSTLY_STATE)
    assert "parallel.zero = 3" in words and 'memory.offload = "optimizer"' in words
    assert "recompute" not in words


def test_fragmentation_is_named(tmp_path: Path) -> None:
    words = advice(small_job(tmp_path, 1), MOSTLY_STATE | {"reserved, unused": 20 * GIB})
    assert "expandable_segments" in words


@pytest.fixture
def device_stats(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {"allocated_bytes.all.current": 10 * GIB, "reserved_bytes.all.current": 11 * GIB}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    properties = SimpleNamespace(total_memory=80 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


def test_the_breakdown_counts_each_byte_of_state_once(tmp_path: Path, device_stats: None) -> None:
    job = small_job(tmp_path, 1)
    device = torch.device("cpu")
    trainer = Trainer(job, build_mesh(job, device), device)
    trainer.close()
    weights = sum(weight.master.nbytes for weight in trainer.engine.weights)
    for weight in trainer.engine.weights:
        weight.parameter.grad = torch.zeros_like(weight.parameter)
    found = memory_breakdown(trainer, device)
    assert found["parameters"] == found["gradients"] == weights  # fp32: no separate masters
    assert 2 * weights <= found[OPTIMIZER] < 2 * weights + 4096
    known = found["parameters"] + found["gradients"] + found[OPTIMIZER]
    assert found["activations and buffers"] == 10 * GIB - known
    assert found["reserved, unused"] == GIB


def test_memory_can_run_out_before_there_is_a_model(tmp_path: Path, device_stats: None) -> None:
    complaint = torch.OutOfMemoryError("Tried to allocate 4.00 GiB. GPU 0 has a total of 80 GiB.")
    error = device_memory_error(complaint, small_job(tmp_path, 1), None, torch.device("cuda"))
    assert "Tried to allocate 4.00 GiB" in str(error)
    assert "activations and buffers 10.00 GiB" in str(error)
    assert error.advice
