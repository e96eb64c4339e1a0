"""Each CUDA operator against plain torch in fp32. Run by `pytest -m gpu tests/gpu`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.model import loss, ops
from phalanx.model.cuda.attention import causal_attention, flash_applies, flash_installed
from phalanx.model.loss import VocabSlice
from phalanx.parallel import float8
from phalanx.train.optim.kernels import fused_adamw
from phalanx.train.optim.moments import Moments

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16_ERROR = 4e-3  # one rounding of each element


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def error(found: Tensor, expected: Tensor) -> float:
    assert found.isfinite().all()
    found, expected = found.detach().float(), expected.detach().float()
    return float((found - expected).norm() / expected.norm())


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the torch forms only."""
    for module in (ops, float8):
        monkeypatch.setattr(module, "HAS_KERNELS", False)


@pytest.mark.parametrize("width", [1024, 2048, 3072])
@pytest.mark.parametrize("joined", [True, False])
def test_norm_and_its_gradients_equal_torch(width: int, joined: bool) -> None:
    x, branch = random(3, 77, width), random(3, 77, width)
    weight = random(width)
    inputs = [t.clone().requires_grad_() for t in (x, branch, weight)]
    total, normed = ops.add_rms_norm(inputs[0], inputs[1] if joined else None, inputs[2], 1e-5)
    wide = [t.float().requires_grad_() for t in (x, branch, weight)]
    expected_total = (x + branch).float() if joined else x.float()
    expected_total = expected_total + (wide[0] + wide[1] if joined else wide[0])
    expected_total = expected_total - expected_total.detach() + total.detach().float()
    expected = F.rms_norm(expected_total, (width,), wide[2], 1e-5)
    assert error(normed, expected) < BF16_ERROR
    slopes = random(3, 77, width), random(3, 77, width)
    torch.autograd.backward((total, normed), slopes)
    torch.autograd.backward((expected_total, expected), [s.float() for s in slopes])
    kept = slice(None, None, 1 if joined else 2)  # without a branch it has no gradient
    for found, reference in zip(inputs[kept], wide[kept], strict=True):
        assert found.grad is not None and reference.grad is not None
        assert error(found.grad, reference.grad) < BF16_ERROR


@pytest.mark.parametrize("width", [16, 48, 128, 224, 832])  # 224: Llama 8B, 832: 405B
def test_swiglu_and_its_gradient_equal_torch(width: int) -> None:
    pairs, slope = random(5, 33, 6 * width), random(5, 33, 3 * width)
    found, wide = pairs.clone().requires_grad_(), pairs.float().requires_grad_()
    gate, up = wide.unflatten(-1, (-1, 2, width)).unbind(-2)
    expected = (F.silu(gate) * up).flatten(-2)
    result = ops.swiglu(found, width)
    assert error(result, expected) < BF16_ERROR
    result.backward(slope)
    expected.backward(slope.float())
    assert found.grad is not None and wide.grad is not None
    assert error(found.grad, wide.grad) < BF16_ERROR


@pytest.mark.parametrize(("queries", "head_dim"), [(4, 64), (3, 128), (1, 64)])
def test_rope_and_its_gradient_equal_torch(queries: int, head_dim: int) -> None:
    packed = random(2, 50, 2 * (queries + 2) * head_dim)
    angle = torch.randn(50, head_dim // 2, device="cuda")
    cos, sin = angle.cos(), angle.sin()
    found, wide = packed.clone().requires_grad_(), packed.float().requires_grad_()
    parts = ops.split_rope(found, cos, sin, queries, head_dim)
    q, k, v = ops.split_heads(wide, queries, head_dim)
    expected = (ops.apply_rope(q, cos, sin), ops.apply_rope(k, cos, sin), v)
    for part, reference in zip(parts, expected, strict=True):
        assert error(part, reference) < BF16_ERROR
    slopes = [random(*part.shape) for part in parts]
    torch.autograd.backward(parts, slopes)
    torch.autograd.backward(expected, [s.float() for s in slopes])
    assert found.grad is not None and wide.grad is not None
    assert error(found.grad, wide.grad) < BF16_ERROR


@pytest.mark.parametrize("tokens", [4096, 4104])
def test_linear_and_its_gradients_equal_torch(tokens: int) -> None:
    # 4096 tokens go through the tuned matmuls; 4104 is no multiple of 16 and falls back.
    x, weight, slope = random(2, tokens // 2, 2048), random(3072, 2048), random(tokens, 3072)
    slope = slope.view(2, tokens // 2, 3072)
    found = [t.clone().requires_grad_() for t in (x, weight)]
    wide = [t.float().requires_grad_() for t in (x, weight)]
    result, expected = ops.linear(*found), F.linear(*wide)
    assert error(result, expected) < BF16_ERROR
    result.backward(slope)
    expected.backward(slope.float())
    for one, other in zip(found, wide, strict=True):
        assert one.grad is not None and other.grad is not None
        assert error(one.grad, other.grad) < BF16_ERROR


@pytest.mark.parametrize("dtype", [float8.FORWARD, float8.BACKWARD])
def test_fp8_matmul_equals_the_product_of_its_operands(dtype: torch.dtype) -> None:
    a, b = random(4096, 2048).to(dtype), random(3072, 2048).to(float8.FORWARD)
    scales = torch.tensor(0.5, device="cuda"), torch.tensor(4.0, device="cuda")
    expected = 2.0 * (a.float() @ b.float().t())
    for fast, allowed in ((False, 5e-3), (True, 3e-2)):
        found = float8.multiply(a, scales[0], b, scales[1], torch.bfloat16, fast=fast)
        assert error(found, expected) < allowed


@pytest.mark.parametrize("vocab", [1000, 128256])
@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_cross_entropy_in_place_equals_torch(vocab: int, sliced: bool, z_loss: float) -> None:
    logits, labels = random(70, vocab) * 3, torch.randint(2 * vocab, (70,), device="cuda")
    labels = labels if sliced else labels % vocab
    labels[5] = -100
    scale = torch.tensor(0.01, device="cuda")
    part = VocabSlice(vocab // 2, lambda x: x, lambda x: x) if sliced else None
    found, slope = loss._cross_entropy(logits.clone(), labels, scale, part, True, z_loss)
    ops.HAS_KERNELS = False
    try:
        expected, reference = loss._cross_entropy(logits.float(), labels, scale, part, True, z_loss)
    finally:
        ops.HAS_KERNELS = True
    assert slope is not None and reference is not None
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert error(slope, reference) < BF16_ERROR
    assert not slope[5].any()


def test_capped_logits_have_the_loss_and_gradients_of_the_textbook() -> None:
    hidden, weight = random(70, 64).requires_grad_(), random(1000, 64).requires_grad_()
    labels, scale = torch.randint(1000, (70,), device="cuda"), torch.tensor(0.01, device="cuda")
    found = loss.linear_cross_entropy(hidden, weight, labels, scale, softcap=5.0)
    slopes = torch.autograd.grad(found, (hidden, weight))
    wide = [tensor.detach().float().requires_grad_() for tensor in (hidden, weight)]
    logits = 5.0 * torch.tanh(wide[0] @ wide[1].t() / 5.0)
    expected = F.cross_entropy(logits, labels, reduction="sum") * scale
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)
    for mine, theirs in zip(slopes, torch.autograd.grad(expected, wide), strict=True):
        assert error(mine, theirs) < 2e-2


@pytest.mark.skipif(not flash_installed(), reason="FlashAttention 4 is not installed")
@pytest.mark.parametrize("size", [64, 128])
def test_flash_attention_is_as_near_to_the_exact_as_torchs(size: int) -> None:
    shapes = [(2, 1029, heads, size) for heads in (8, 2, 2)]
    inputs = [random(*shape).requires_grad_() for shape in shapes]
    slope = random(*shapes[0])
    assert flash_applies(inputs[0], inputs[2])

    def results(attend: Any, given: list[Tensor]) -> list[Tensor]:
        out = attend(*given, size**-0.5)
        return [out, *torch.autograd.grad(out, given, slope.to(out.dtype))]

    found = results(causal_attention, inputs)
    inside = results(torch.compile(causal_attention, fullgraph=True), inputs)
    wide = [each.detach().double().requires_grad_() for each in inputs]
    for mine, compiled, exact in zip(found, inside, results(exact_attention, wide), strict=True):
        assert error(mine, exact) < BF16_ERROR and error(compiled, exact) < BF16_ERROR


def exact_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    repeat = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    scores = (q @ k.mT) * scale
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return (scores.masked_fill(later, -torch.inf).softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("skip", [False, True])
def test_adamw_equals_the_torch_form(dtype: torch.dtype, skip: bool) -> None:
    size = 5003
    state = [random(size, dtype=torch.float32) for _ in range(4)]
    state[2].abs_()
    tensors = [state[0].to(torch.bfloat16), *state[:3], state[3].to(dtype)]
    twins = [t.clone().cpu() for t in tensors]
    scalars = {
        "step": torch.tensor(3.0),
        "multiplier": torch.tensor(0.5),
        "skip": torch.tensor(skip),
    }
    hyper = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    for each, on in ((tensors, "cuda"), (twins, "cpu")):
        there = {name: scalar.to(on) for name, scalar in scalars.items()}
        weight, master, first, second, grad = each
        fused_adamw(weight, master, Moments(first, second), grad, **hyper, **there)
    torch.testing.assert_close(tensors[0].cpu(), twins[0], rtol=8e-3, atol=1e-6)
    for found, expected in zip(tensors[1:], twins[1:], strict=True):
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-7)


def fp8_values(q: float8.Quantized, order: str) -> Tensor:
    stored = q.rows if order == "rows" else q.columns.t()
    return stored.float() * q.scale


@pytest.mark.parametrize("shape", [(256, 128), (272, 1040), (4096, 3072)])
def test_fp8_operands_equal_the_torch_form_in_both_orders(
    shape: tuple[int, int], request: pytest.FixtureRequest
) -> None:
    x, weight = random(*shape), random(shape[1])
    _, rstd = float8.join_statistics(x, None, 1e-5)
    peaks = float8.measure(x)
    made = [
        float8.quantize(x, peaks, float8.FORWARD, rows=True, columns=True),
        float8.quantize_gradient(x * 1e-6),
        float8.norm_quantize(x, rstd, weight, rows=True, columns=True),
    ]
    request.getfixturevalue("plain")
    expected = [
        float8.quantize(x, peaks, float8.FORWARD),
        float8.quantize_gradient(x * 1e-6),
        float8.norm_quantize(x, rstd, weight),
    ]
    for found, reference in zip(made, expected, strict=True):
        assert found.scale.item() == reference.scale.item()
        for order in ("rows", "columns"):
            assert error(fp8_values(found, order), fp8_values(reference, order)) < 1e-3


@pytest.mark.parametrize(
    ("tokens", "groups", "width"), [(80, 4, 32), (2048, 64, 128), (304, 8, 224)]
)
def test_fp8_swiglu_gradient_equals_the_torch_form(
    tokens: int, groups: int, width: int, request: pytest.FixtureRequest
) -> None:
    pairs, slope = random(tokens, 2 * groups * width), random(tokens, groups * width) * 1e-5
    peaks = float8.measure(ops.swiglu(pairs, width))
    made = float8.swiglu_backward(slope, pairs, peaks, width)
    request.getfixturevalue("plain")
    expected = float8.swiglu_backward(slope, pairs, peaks, width)
    for order in ("rows", "columns"):
        assert error(fp8_values(made[0], order), fp8_values(expected[0], order)) < 1e-3
    # Here silu is rounded to bf16 before the product, so some values fall to the next fp8 number.
    assert error(fp8_values(made[1], "columns"), fp8_values(expected[1], "columns")) < 3e-2
