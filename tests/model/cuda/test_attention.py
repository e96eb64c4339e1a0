"""Which kernels attend on CUDA, without a device: shapes on fake tensors, and the choice."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx.model.cuda import attention
from phalanx.model.cuda.attention import FLASH_VERSION, flash_applies, flash_forward

SHAPE = (2, 2048, 8, 64)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hopper card with FlashAttention 4 beside it."""
    monkeypatch.setattr(attention, "_flash_runs_on", lambda _device: True)


@pytest.mark.usefixtures("flash")
@pytest.mark.parametrize(
    ("shape", "dtype", "applies"),
    [
        (SHAPE, torch.bfloat16, True),
        ((2, 2048, 8, 128), torch.bfloat16, True),
        ((2, 2048, 8, 96), torch.bfloat16, False),
        ((2, 512, 8, 64), torch.bfloat16, False),
        (SHAPE, torch.float16, False),
        (SHAPE, torch.float32, False),
    ],
)
def test_flash_takes_what_was_measured(
    shape: tuple[int, ...], dtype: torch.dtype, applies: bool
) -> None:
    with FakeTensorMode():
        q = torch.empty(shape, dtype=dtype, device="cuda")
        assert flash_applies(q, q) is applies
        wider = torch.empty((*shape[:-1], 192), dtype=dtype, device="cuda")
        assert not flash_applies(q, wider)


@pytest.mark.usefixtures("flash")
def test_bits_that_must_repeat_are_left_to_torch() -> None:
    with FakeTensorMode():
        q = torch.empty(SHAPE, dtype=torch.bfloat16, device="cuda")
        torch.use_deterministic_algorithms(True)
        try:
            assert not flash_applies(q, q)
        finally:
            torch.use_deterministic_algorithms(False)


def test_another_version_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"version": FLASH_VERSION}
    monkeypatch.setattr(attention.importlib.metadata, "version", lambda _: found["version"])
    attention.flash_installed.cache_clear()
    assert attention.flash_installed()
    found["version"] = "4.0.0"
    attention.flash_installed.cache_clear()
    try:
        assert not attention.flash_installed()
    finally:
        attention.flash_installed.cache_clear()


def test_gradients_have_the_shapes_of_grouped_heads() -> None:
    made = {"dtype": torch.bfloat16, "device": "meta", "requires_grad": True}
    q = torch.empty(SHAPE, **made)
    k, v = (torch.empty((2, 2048, 2, 64), **made) for _ in range(2))
    out, lse = flash_forward(q, k, v, 0.125)
    assert out.shape == q.shape and lse.shape == (2, 8, 2048) and lse.dtype == torch.float32
    slopes = torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
    assert [slope.shape for slope in slopes] == [q.shape, k.shape, v.shape]
