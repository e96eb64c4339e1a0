"""Attention: packed documents stay apart, rotary scaling, latent projections."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from phalanx.config import LatentAttentionShape, Model, RopeScaling, Window
from phalanx.model import attention
from phalanx.model.attention import CausalAttention, document_mask, window_mask
from phalanx.model.ops import apply_rope
from phalanx.model.rope import rope_tables
from phalanx.model.score_peaks import ScorePeaks
from tests.model.small_models import built, plain_context, small_model

LATENT = LatentAttentionShape(
    query_rank=12, key_value_rank=10, content_head_dim=8, rope_head_dim=4, value_head_dim=6
)
KINDS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "qk-norm": {"qk_norm": True},
    "latent": {"kv_heads": 4, "latent": LATENT},
    "scaled-rope": {"rope_scaling": RopeScaling(original_context=8), "rope_theta": 100.0},
}


def tokens(seed: int, length: int) -> Tensor:
    return torch.randint(0, 61, (1, length), generator=torch.Generator().manual_seed(seed))


def numbered(*lengths: int) -> Tensor:
    """Document numbers of documents of these lengths, packed into one sample."""
    parts = [torch.full((n,), i, dtype=torch.int32) for i, n in enumerate(lengths)]
    return torch.cat(parts)[None]


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_does_not_see_the_one_packed_before_it(kind: str) -> None:
    model = built(small_model(**KINDS[kind]), 16)
    before, other, document = tokens(1, 9), tokens(2, 9), tokens(3, 7)
    documents = numbered(9, 7)
    first = model(torch.cat((before, document), 1), documents=documents)
    second = model(torch.cat((other, document), 1), documents=documents)
    torch.testing.assert_close(first[:, 9:], second[:, 9:], rtol=0, atol=0)
    # Without the mask it does: the test would otherwise prove nothing.
    unmasked = model(torch.cat((other, document), 1))
    assert (unmasked[:, 9:] - second[:, 9:]).abs().max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_document_has_the_logits_it_has_alone(kind: str) -> None:
    """Rotary positions are relative: where a document starts in its sample does not matter."""
    config = small_model(**KINDS[kind])
    packed = built(config, 16)(torch.cat((tokens(1, 9), tokens(3, 7)), 1), documents=numbered(9, 7))
    alone = built(config, 7)(tokens(3, 7))
    torch.testing.assert_close(packed[:, 9:], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_one_document_is_plain_causal_attention(kind: str) -> None:
    model = built(small_model(**KINDS[kind]), 12)
    sample = tokens(4, 12)
    torch.testing.assert_close(
        model(sample, documents=numbered(12)), model(sample), rtol=1e-5, atol=1e-5
    )


def test_blocks_of_documents_are_attended_by_what_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Uncompiled, flex attention holds all scores: on CUDA nothing else may be called."""
    called = []

    def watch(function: Callable[..., Any]) -> Callable[..., Any]:
        called.append(function)
        return function

    monkeypatch.setattr(attention, "compiled", watch)
    mask = create_block_mask(lambda b, h, q, k: q >= k, 1, None, 128, 128, device="cpu")
    q = torch.randn(1, 128, 2, 16)
    found = CausalAttention()(q, q, q, mask)
    assert called == [flex_attention]
    torch.testing.assert_close(found, CausalAttention()(q, q, q, None))


def textbook(q: Tensor, k: Tensor, v: Tensor, near: int, cap: float, sinks: Tensor) -> Tensor:
    """Each query by itself: its scores, capped, beside the sink of its head."""
    out = torch.zeros_like(q)
    for head in range(q.shape[2]):
        keys, values = k[0, :, head // 2], v[0, :, head // 2]
        for at in range(q.shape[1]):
            seen = slice(max(0, at - near + 1), at + 1)
            scores = keys[seen] @ q[0, at, head] * q.shape[-1] ** -0.5
            if cap:
                scores = cap * torch.tanh(scores / cap)
            weights = scores.exp() / (scores.exp().sum() + sinks[head].exp())
            out[0, at, head] = weights @ values[seen]
    return out


@pytest.mark.parametrize("near", [128, 20])
@pytest.mark.parametrize(("cap", "sunk"), [(1.5, False), (0.0, True), (1.5, True)])
def test_capped_scores_and_sinks_are_those_of_the_textbook_by_either_way(
    near: int, cap: float, sunk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held in full, and by what FlexAttention does with each score."""
    monkeypatch.setattr(attention, "compiled", lambda function: function)
    blocks = create_block_mask(
        lambda b, h, q, k: (q >= k) & (q - k < near), 1, None, 128, 128, device="cpu"
    )
    q, k, v = (2 * torch.randn(1, 128, heads, 16) for heads in (4, 2, 2))
    sinks = torch.tensor([-1.0, 0.0, 2.0, 5.0])
    expected = textbook(q, k, v, near, cap, sinks if sunk else sinks - torch.inf)
    core, given = CausalAttention(softcap=cap), sinks if sunk else None
    plain = None if near == 128 else window_mask(near, 128, q.device)
    torch.testing.assert_close(core(q, k, v, plain, given), expected)
    torch.testing.assert_close(core(q, k, v, blocks, given), expected)


def test_sinks_learn_from_what_they_take() -> None:
    """The gradient of a sink, by a small step."""
    model = built(small_model(attention_sinks=True), 12)
    sinks = model.get_parameter("layers.0.attention.sinks")
    sample, step = tokens(4, 12), torch.tensor([0.0, 0.05, 0.0, 0.0])
    loss = model(sample).square().mean()
    (gradient,) = torch.autograd.grad(loss, sinks)
    with torch.no_grad():
        sinks += step
        above = model(sample).square().mean()
        sinks -= 2 * step
        below = model(sample).square().mean()
    assert float(gradient[1]) == pytest.approx(float(above - below) / 0.1, rel=2e-2)


def test_no_token_sees_a_later_one() -> None:
    model = built(small_model(), 12)
    sample = tokens(4, 12)
    changed = sample.clone()
    changed[0, 8] = (changed[0, 8] + 1) % 61
    before, after = model(sample), model(changed)
    assert torch.equal(before[:, :8], after[:, :8])
    assert not torch.equal(before[:, 8:], after[:, 8:])


def test_the_mask_is_lower_triangular_inside_each_document_of_each_sample() -> None:
    documents = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 2]], dtype=torch.int32)
    mask = document_mask(documents)
    assert isinstance(mask, Tensor)
    expected = [
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]],
        [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]],
    ]
    assert mask[:, 0].int().tolist() == expected


def test_a_window_shows_the_nearest_tokens_of_the_own_document() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 1]], dtype=torch.int32)
    mask, alone = document_mask(documents, window=2), window_mask(2, 5, torch.device("cpu"))
    assert isinstance(mask, Tensor) and isinstance(alone, Tensor)
    assert mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1],
    ]
    assert alone.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 1, 1],
    ]
    assert window_mask(5, 5, torch.device("cpu")) is None


def test_only_layers_with_the_window_lose_sight_of_a_far_token() -> None:
    sample = torch.randint(61, (1, 12), generator=torch.Generator().manual_seed(2))
    far = sample.clone()
    far[0, 0] = (far[0, 0] + 1) % 61
    # Two layers with a window of 3 reach back 2 * 2 tokens; a layer that sees all reaches any.
    for full_every, reach in ((0, 4), (2, 11)):
        config = small_model(window=Window(size=3, full_every=full_every))
        model = built(config, 12).eval()
        with torch.no_grad():
            changed = (model(sample) != model(far)).any(-1)[0]
        assert changed[: reach + 1].all()
        assert not changed[reach + 1 :].any()


def test_a_packed_document_has_the_logits_it_has_alone_behind_a_window() -> None:
    model = built(small_model(window=Window(size=3)), 12).eval()
    sample = torch.randint(61, (1, 12), generator=torch.Generator().manual_seed(3))
    documents = torch.tensor([[0] * 5 + [1] * 7])
    with torch.no_grad():
        packed = model(sample, documents=documents)
        model.prepare(torch.arange(5))
        torch.testing.assert_close(packed[:, :5], model(sample[:, :5]))


def reference_frequency(config: Model, pair: int) -> float:
    """Angular frequency of one pair, as the Llama 3 report describes its scaling."""
    frequency = config.rope_theta ** (-2 * pair / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return float(frequency)
    wavelength = 2 * math.pi / frequency
    if wavelength < scaling.original_context / scaling.high_frequency_factor:
        return float(frequency)
    if wavelength > scaling.original_context / scaling.low_frequency_factor:
        return float(frequency / scaling.factor)
    smooth = (scaling.original_context / wavelength - scaling.low_frequency_factor) / (
        scaling.high_frequency_factor - scaling.low_frequency_factor
    )
    return float((1 - smooth) * frequency / scaling.factor + smooth * frequency)


@pytest.mark.parametrize("scaling", [None, RopeScaling(), RopeScaling(factor=32.0)])
def test_rotary_tables_follow_the_llama_3_formula(scaling: RopeScaling | None) -> None:
    config = small_model(head_dim=128, rope_scaling=scaling)
    positions = torch.tensor([0, 1, 17, 1000])
    frequencies = [reference_frequency(config, pair) for pair in range(64)]
    if scaling is not None:  # all three regimes occur
        ratios = {
            round(f / config.rope_theta ** (-2 * i / 128), 3) for i, f in enumerate(frequencies)
        }
        assert {1.0, round(1 / scaling.factor, 3)} < ratios
    angle = positions[:, None].double() * torch.tensor(frequencies, dtype=torch.float64)
    cos, sin = rope_tables(config, positions)
    torch.testing.assert_close(cos.double(), angle.cos(), rtol=0, atol=2e-4)
    torch.testing.assert_close(sin.double(), angle.sin(), rtol=0, atol=2e-4)


def test_rotation_turns_each_pair_by_its_angle() -> None:
    config = small_model(head_dim=8)
    cos, sin = rope_tables(config, torch.arange(5))
    x = torch.randn(2, 5, 3, 8, generator=torch.Generator().manual_seed(0))
    as_complex = torch.complex(x[..., :4], x[..., 4:])
    angle = torch.arange(5)[:, None] * torch.tensor(
        [reference_frequency(config, pair) for pair in range(4)]
    )
    turned = as_complex * torch.polar(torch.ones_like(angle), angle)[:, None, :]
    expected = torch.cat((turned.real, turned.imag), -1)
    torch.testing.assert_close(apply_rope(x, cos, sin), expected)


def naive_latent(model: Any, x: Tensor, latent: LatentAttentionShape, heads: int) -> Tensor:
    """Latent attention, one head and one query at a time."""
    attention = model.layers["0"].attention
    batch, length, _ = x.shape

    def normed(t: Tensor, norm: Any) -> Tensor:
        return t / (t.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight

    low = x
    if latent.query_rank:
        low = normed(x @ attention.q_down.weight.t(), attention.q_norm)
    queries = (low @ attention.q_up.weight.t()).view(batch, length, heads, -1)
    down = x @ attention.kv_down.weight.t()
    compressed, shared_key = down[..., : latent.key_value_rank], down[..., latent.key_value_rank :]
    both = normed(compressed, attention.kv_norm) @ attention.kv_up.weight.t()
    both = both.view(batch, length, heads, -1)
    content = latent.content_head_dim
    shared_key = apply_rope(shared_key[:, :, None], model.cos, model.sin)[:, :, 0]
    scale = (content + latent.rope_head_dim) ** -0.5
    outputs = []
    for head in range(heads):
        q, kv = queries[:, :, head], both[:, :, head]
        rotated = apply_rope(q[:, :, None, content:], model.cos, model.sin)[:, :, 0]
        scores = q[..., :content] @ kv[..., :content].mT + rotated @ shared_key.mT
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = (scores * scale).masked_fill(hidden, -math.inf).softmax(-1)
        outputs.append(weights @ kv[..., content:])
    return torch.cat(outputs, -1) @ attention.out.weight.t()


@pytest.mark.parametrize("query_rank", [12, 0])
@pytest.mark.parametrize("value_head_dim", [6, 12, 16])  # narrower than keys, as wide, wider
def test_latent_attention_equals_a_naive_one(query_rank: int, value_head_dim: int) -> None:
    latent = LatentAttentionShape(
        query_rank=query_rank,
        key_value_rank=10,
        content_head_dim=8,
        rope_head_dim=4,
        value_head_dim=value_head_dim,
    )
    model = built(small_model(kv_heads=4, latent=latent), 7)
    x = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(5))
    found = model.layers["0"].attention(x, plain_context(model))
    torch.testing.assert_close(found, naive_latent(model, x, latent, 4), rtol=1e-4, atol=1e-5)


def test_key_value_heads_serve_their_group_of_queries() -> None:
    """Rows of the fused projection: for each key/value head its queries, its key, its value."""
    model = built(small_model(), 6)
    attention: Any = model.layers["0"].attention
    x = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(6))
    rows = (x @ attention.qkv.weight.t()).view(6, 2, 4, 8)  # [seq, kv head, 2 queries + k + v, dim]
    outputs = []
    for head in range(4):
        q, k, v = rows[:, head // 2, head % 2], rows[:, head // 2, 2], rows[:, head // 2, 3]
        q, k = (apply_rope(t[None, :, None], model.cos, model.sin)[0, :, 0] for t in (q, k))
        scores = (q @ k.t() / 8**0.5).masked_fill(torch.ones(6, 6).triu(1).bool(), -math.inf)
        outputs.append(scores.softmax(-1) @ v)
    expected = torch.cat(outputs, -1) @ attention.out.weight.t()
    found = attention(x, plain_context(model))
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [0, 3])
def test_the_core_tells_of_the_largest_score_of_each_head(window: int) -> None:
    chance = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, 8, heads, 4, generator=chance) for heads in (4, 2, 2))
    mask = window_mask(window or 8, 8, q.device)
    measured = CausalAttention(0.5, peaks=ScorePeaks(4))
    found = measured(q, k, v, mask, None, torch.tensor([True, False]))
    torch.testing.assert_close(found, CausalAttention(0.5)(q, k, v, mask))
    assert measured.peaks is not None
    scores = 0.5 * q[0].transpose(0, 1) @ k[0].repeat_interleave(2, 1).permute(1, 2, 0)
    seen = torch.ones(8, 8, dtype=torch.bool).tril().triu(1 - (window or 8))
    expected = scores.masked_fill(~seen, -torch.inf).amax((1, 2))
    torch.testing.assert_close(measured.peaks.peaks, expected)
    measured.eval()(10 * q, k, v, mask)
    torch.testing.assert_close(measured.peaks.peaks, expected)


def test_each_part_of_the_heads_is_told_at_its_place_and_peaks_only_rise() -> None:
    peaks = ScorePeaks(6)
    peaks.part = 1  # of three
    peaks.take(torch.tensor([[[1.0, 3.0], [-2.0, -5.0]]]), None)
    peaks.take(torch.tensor([[[2.0, 2.0], [4.0, 0.0]]]), None)
    assert peaks.peaks.tolist() == [0.0, 0.0, 3.0, 4.0, 0.0, 0.0]
