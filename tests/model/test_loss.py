"""The fused head and loss equal the textbook: logits, then cross-entropy."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.model import VocabSlice, linear_cross_entropy, loss

TOKENS, DIM, VOCAB = 23, 8, 40
SCALE = 0.37


@pytest.fixture(autouse=True, params=["one chunk", "several chunks"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test holds whether the logits fit into one chunk or not."""
    if request.param == "several chunks":
        monkeypatch.setattr(loss, "_CHUNK_BYTES", 5 * VOCAB * 4)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, head and labels, of which some are weightless."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, DIM, generator=generator)
    weight = torch.randn(VOCAB, DIM, generator=generator)
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    labels[[0, 7, 8, TOKENS - 1]] = -100
    return hidden, weight, labels


def reference(softcap: float = 0.0, z_loss: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, gradient of the hidden states, gradient of the head; the last two with the z-loss."""
    hidden, weight, labels = inputs()
    hidden.requires_grad_()
    weight.requires_grad_()
    logits = hidden @ weight.t()
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    expected = F.cross_entropy(logits, labels, reduction="sum") * SCALE
    squares = logits[labels >= 0].logsumexp(-1).square().sum() * SCALE
    return expected, *torch.autograd.grad(expected + z_loss * squares, (hidden, weight))


FORMS = [(0.0, 0.0), (1.5, 0.0), (0.0, 0.2), (1.5, 0.2)]  # cap of the logits, weight of z-loss


@pytest.mark.parametrize(("softcap", "z_loss"), FORMS)
def test_value_and_gradients_equal_cross_entropy_over_real_labels(
    softcap: float, z_loss: float
) -> None:
    hidden, weight, labels = inputs()
    hidden.requires_grad_()
    weight.requires_grad_()
    scale = torch.tensor(SCALE)
    found = linear_cross_entropy(hidden, weight, labels, scale, softcap=softcap, z_loss=z_loss)
    gradients = torch.autograd.grad(3.0 * found, (hidden, weight))
    expected, *slopes = reference(softcap, z_loss)
    torch.testing.assert_close(found, expected)
    for gradient, slope in zip(gradients, slopes, strict=True):
        torch.testing.assert_close(gradient, 3.0 * slope)


def bf16_head_error(monkeypatch: pytest.MonkeyPatch, chunks: int) -> float:
    """How far the head's gradient in bf16 is from that of the same numbers in fp64."""
    tokens, dim, vocab = 2048, 32, 64
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(tokens, dim, generator=generator).bfloat16()
    weight = torch.randn(vocab, dim, generator=generator).bfloat16().requires_grad_()
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    monkeypatch.setattr(loss, "_CHUNK_BYTES", tokens // chunks * vocab * 2)
    found = linear_cross_entropy(hidden, weight, labels, torch.tensor(1.0))
    (gradient,) = torch.autograd.grad(found, weight)
    exact = weight.detach().double().requires_grad_()
    logits = hidden.double() @ exact.t()
    (expected,) = torch.autograd.grad(F.cross_entropy(logits, labels, reduction="sum"), exact)
    return float((gradient.double() - expected).norm() / expected.norm())


def test_many_chunks_round_the_heads_gradient_hardly_more_than_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = bf16_head_error(monkeypatch, 1)
    assert bf16_head_error(monkeypatch, 64) < 1.5 * one < 0.005


def test_weightless_labels_send_no_gradient() -> None:
    hidden, weight, labels = inputs()
    hidden.requires_grad_()
    linear_cross_entropy(hidden, weight, labels, torch.tensor(SCALE)).backward()
    assert hidden.grad is not None
    assert hidden.grad[labels < 0].count_nonzero() == 0
    assert hidden.grad[labels >= 0].abs().sum(1).min() > 0


def test_a_batch_without_any_real_label_costs_nothing() -> None:
    hidden, weight, labels = inputs()
    hidden.requires_grad_()
    found = linear_cross_entropy(hidden, weight, torch.full_like(labels, -100), torch.tensor(SCALE))
    found.backward()
    assert found.item() == 0.0
    assert hidden.grad is not None and hidden.grad.count_nonzero() == 0


def test_leading_dimensions_do_not_matter() -> None:
    hidden, weight, labels = inputs()
    flat = linear_cross_entropy(hidden[:20], weight, labels[:20], torch.tensor(SCALE))
    shaped = linear_cross_entropy(
        hidden[:20].view(4, 5, DIM), weight, labels[:20].view(4, 5), torch.tensor(SCALE)
    )
    assert torch.equal(flat, shaped)


def test_backward_may_be_split_in_two_calls() -> None:
    """A zero-bubble schedule asks for the input's gradient first and for the weight's later."""
    hidden, weight, labels = inputs()
    hidden.requires_grad_()
    weight.requires_grad_()
    found = linear_cross_entropy(hidden, weight, labels, torch.tensor(SCALE))
    slope = torch.tensor(2.0)
    (first,) = torch.autograd.grad(found, hidden, slope, retain_graph=True)
    first = first.clone()
    (second,) = torch.autograd.grad(found, weight, slope)
    _, hidden_slope, weight_slope = reference()
    torch.testing.assert_close(first, 2.0 * hidden_slope)
    torch.testing.assert_close(second, 2.0 * weight_slope)


def test_a_second_backward_may_have_another_gradient() -> None:
    hidden, weight, labels = inputs()
    weight.requires_grad_()
    found = linear_cross_entropy(hidden, weight, labels, torch.tensor(SCALE))
    torch.autograd.grad(found, weight, torch.tensor(8.0), retain_graph=True)
    (second,) = torch.autograd.grad(found, weight, torch.tensor(0.5))
    torch.testing.assert_close(second, 0.5 * reference()[2])


def test_large_logits_do_not_overflow() -> None:
    hidden, weight, labels = inputs()
    hidden = 1000 * hidden
    found = linear_cross_entropy(hidden, weight, labels, torch.tensor(1.0))
    expected = F.cross_entropy(hidden @ weight.t(), labels, reduction="sum")
    torch.testing.assert_close(found, expected)


class Meeting:
    """Threads stand for ranks: each leaves its tensor and gets the combination of all."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=90)
        self._brought: list[Tensor] = []
        self._lock = threading.Lock()

    def combine(self, x: Tensor, how: Callable[[Tensor], Tensor]) -> Tensor:
        with self._lock:
            self._brought.append(x.detach().clone())
        self._barrier.wait()
        result = how(torch.stack(self._brought))
        if self._barrier.wait() == 0:
            self._brought.clear()
        self._barrier.wait()
        return result


@pytest.mark.parametrize(("softcap", "z_loss"), FORMS)
def test_slices_of_the_vocabulary_combine_to_the_whole(softcap: float, z_loss: float) -> None:
    hidden, weight, labels = inputs()
    cut = VOCAB // 2
    meeting = Meeting(2)
    losses: dict[int, Tensor] = {}
    slopes: dict[int, tuple[Tensor, ...]] = {}

    def rank(first: int, rows: Tensor) -> None:
        x, w = hidden.clone().requires_grad_(), rows.clone().requires_grad_()
        vocab = VocabSlice(
            first,
            lambda t: meeting.combine(t, lambda s: s.amax(0)),
            lambda t: meeting.combine(t, lambda s: s.sum(0)),
        )
        scale = torch.tensor(SCALE)
        losses[first] = linear_cross_entropy(x, w, labels, scale, vocab, softcap, z_loss)
        slopes[first] = torch.autograd.grad(losses[first], (x, w))

    parts = [(0, weight[:cut]), (cut, weight[cut:])]
    threads = [threading.Thread(target=rank, args=part) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=100)
    expected, hidden_slope, weight_slope = reference(softcap, z_loss)
    torch.testing.assert_close(losses[0], expected)
    torch.testing.assert_close(losses[cut], expected)
    torch.testing.assert_close(slopes[0][0] + slopes[cut][0], hidden_slope)
    torch.testing.assert_close(torch.cat((slopes[0][1], slopes[cut][1])), weight_slope)
