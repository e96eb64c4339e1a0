"""Recipes on a GPU: kernels agree with torch, and nothing makes the host wait."""

from __future__ import annotations

import pytest
import torch

from phalanx.model import CausalAttention, ScorePeaks, linear_cross_entropy
from phalanx.model.attention import plain_attention, window_mask
from phalanx.parallel import build_mesh
from phalanx.train.parity.prove import make_steps
from phalanx.train.trainer import Trainer
from tests.parallel.test_parity import make_job

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_the_z_loss_of_the_kernel_equals_torchs() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(96, 64)
    weight = torch.randn(1000, 64)
    labels = torch.randint(0, 1000, (96,))
    labels[::7] = -100
    results = []
    for device in ("cpu", "cuda"):
        x, w = (t.to(device).requires_grad_() for t in (hidden, weight))
        scale = torch.tensor(0.1, device=device)
        loss = linear_cross_entropy(x, w, labels.to(device), scale, z_loss=0.05)
        results.append([t.cpu() for t in (loss, *torch.autograd.grad(loss, (x, w)))])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("window", [0, 64])
def test_flex_attention_tells_of_the_largest_scores(window: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 256, 4, 64, device="cuda").bfloat16() for _ in range(3))
    blocks = window_mask(window or 256, 256, q.device, blocks=True)
    core = CausalAttention(peaks=ScorePeaks(4)).cuda()
    core(q, k, v, blocks, None, torch.tensor([True, False], device="cuda"))
    assert core.peaks is not None
    seen: list[torch.Tensor] = []
    band = torch.ones(256, 256, dtype=torch.bool).tril().triu(1 - (window or 256))
    args = [t[:1].cpu().float().transpose(1, 2) for t in (q, k, v)]
    plain_attention(*args, band, 64**-0.5, 0.0, None, seen.append)
    torch.testing.assert_close(core.peaks.peaks.cpu(), seen[0].amax((0, 2)), rtol=1e-2, atol=1e-2)


def test_a_step_with_every_recipe_makes_no_host_synchronisation_of_its_own() -> None:
    """The update's part of it: clipping, balancing and the average."""
    moe = {"experts": 4, "top_k": 2, "ffn": 64, "balance": "bias-auxiliary"}
    sections = {
        "model": {"dim": 64, "layers": 2, "qk_clip": 0.01, "z_loss_coefficient": 1e-3}
        | {"moe": {**moe, "auxiliary_over": "batch"}},
        "precision": {"compute": "bfloat16"},
        "data": {"sequence": 128},
        "train": {"device": "cuda", "ema": {"decay": 0.9}, "compile": "off"},
    }
    device = torch.device("cuda")
    job = make_job(1, sections)
    trainer = Trainer(job, build_mesh(job, device), device)
    make_steps(trainer, 2)
    keep = torch.tensor(False, device=device)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        trainer.qk_clip.apply(keep)
        trainer.average.update(3, keep)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    trainer.close()
