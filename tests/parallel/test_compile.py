"""Blocks are compiled whatever is recomputed or moved, and compute the same.

Without the compiler's last part, which writes code: graphs run as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from phalanx.train.parity.prove import train
from tests.parallel.test_parity import make_job

MODEL = {"layers": 1, "qk_norm": True, "kv_heads": 2}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "recompute-full": (MODEL, {"recompute": "full"}),
    "recompute-selective": (MODEL, {"recompute": "selective"}),
    "dropout": ({**MODEL, "dropout": 0.1}, {"recompute": "selective"}),
    "offload-activations": (MODEL, {"offload_activations": True}),
    "both": (MODEL, {"recompute": "full", "offload_activations": True}),
    "latent-clipped": (
        {
            "layers": 1,
            "qk_clip": 0.02,
            "latent": {
                "query_rank": 16,
                "key_value_rank": 16,
                "content_head_dim": 8,
                "rope_head_dim": 4,
                "value_head_dim": 8,
            },
        },
        {"recompute": "selective"},
    ),
}


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounterWithBackend]:
    """Counts what the compiler hands over."""
    counter, as_it_is = CompileCounterWithBackend("aot_eager"), nn.Module.compile

    def counted(module: nn.Module, **options: Any) -> None:
        as_it_is(module, backend=counter, **options)

    monkeypatch.setattr(nn.Module, "compile", counted)
    torch.compiler.reset()
    yield counter
    torch.compiler.reset()


@pytest.mark.parametrize("name", CASES)
def test_blocks_are_compiled_and_compute_the_same(
    name: str, counter: CompileCounterWithBackend
) -> None:
    model, memory = CASES[name]
    sections = {"model": model, "memory": memory, "data": {"document_mask": True}}
    numbers = [
        train(make_job(1, {**sections, "train": {"micro_batch": 4, "steps": 2, "compile": mode}}))
        for mode in ("off", "on")
    ]
    assert counter.frame_count > 0
    for (loss, norm), (expected_loss, expected_norm) in zip(*numbers, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-6)
        assert norm == pytest.approx(expected_norm, rel=1e-6)
