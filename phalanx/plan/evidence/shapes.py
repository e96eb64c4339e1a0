"""The model's shape in one row of a table of runs, as far as its author gave it."""

from __future__ import annotations

import re
from typing import Any

from phalanx.config import PRESETS, LatentAttentionShape, Model, Moe
from phalanx.plan.evidence.fields import MOST, SkippedRowError, integer

USUAL_VOCAB = 51200


def model_of(row: dict[str, str], pipeline: int) -> Model:
    """The model of a row, or a preset by name; SkippedRowError where its shape is not given."""
    if not row.get("hidden") or not row.get("ffn"):
        preset = PRESETS.get(row.get("model", ""))
        if preset is None:
            raise SkippedRowError("the model's shape is not given")
        return preset
    dim, vocab = integer(row, "hidden"), integer(row, "vocab", USUAL_VOCAB)
    name = row.get("model", "").lower()
    written = row["ffn"].replace(",", "").lower()
    if integer(row, "experts", 1) > 1 and "moe" not in written:
        written = f"moe{written}"  # one width beside experts is theirs
    moe_text = re.search(r"moe(\d+)", written)
    dense_text = re.match(r"(\d+)(?:\.0*)?(?![\w.])", written)
    if not moe_text and not dense_text:
        raise SkippedRowError(f"ffn = {row['ffn']!r} is not a number")
    widths = [int(found[1]) for found in (dense_text, moe_text) if found]
    if not all(1 <= width <= MOST["ffn"] for width in widths):
        raise SkippedRowError(f"ffn = {row['ffn']!r} must be 1 to {MOST['ffn']:,}")
    ffn = widths[0]
    heads = integer(row, "heads", _usual_heads(dim))
    gated = moe_text is not None or ffn != 4 * dim or "llama" in name
    shape: dict[str, Any] = {
        "dim": dim,
        "heads": heads,
        "ffn": ffn,
        "vocab": vocab,
        "mlp": "swiglu" if gated else "gelu",
    }
    if row.get("kv_heads", "").upper() == "MLA":
        latent = LatentAttentionShape()  # DeepSeek-V3's ranks and widths
        wide = latent.content_head_dim + latent.rope_head_dim
        shape |= {"latent": latent, "kv_heads": heads, "head_dim": wide}
    else:
        shape |= {"kv_heads": integer(row, "kv_heads", heads)}
        shape |= {"head_dim": 128 if name.startswith("qwen3") else _usual_width(dim, heads)}
    if moe_text is not None:
        shape["moe"] = _experts(row, int(moe_text[1]), dense_text is not None)
    layers = integer(row, "layers", 0) or _layers_from_size(name, dim, vocab, pipeline)
    if row.get("vocab", "").startswith("~"):
        shape["vocab"] = _vocab_from_size(name, dim, vocab, layers)
    return Model(layers=layers, **shape)


def _experts(row: dict[str, str], ffn: int, dense_first: bool) -> Moe:
    """DeepSeek's shape (a dense width beside the experts') has a shared expert as well.

    DeepSeek-V3 itself sends a token to four of eight groups of experts (arXiv:2412.19437).
    """
    deepseek = dense_first and "deepseek" in row.get("model", "").lower()
    first = (3 if deepseek else 1) if dense_first else 0
    experts, top_k = integer(row, "experts"), integer(row, "topk")
    if top_k > experts:
        raise SkippedRowError(f"topk = {top_k} exceeds {experts} experts")
    return Moe(
        experts=experts,
        top_k=top_k,
        ffn=ffn,
        shared_experts=1 if dense_first else 0,
        shared_ffn=ffn if dense_first else 0,
        first_dense_layers=first,
        groups=8 if deepseek else 1,
        top_groups=4 if deepseek else 1,
    )


def _usual_width(dim: int, heads: int) -> int:
    """Width of a head: the model's share, unless that cannot be rotated in pairs."""
    share, rest = divmod(dim, heads)
    return 64 if rest or share % 2 else share


def _usual_heads(dim: int) -> int:
    """Heads of the width nearest to 128 that divides the model's."""
    counts = [n for n in range(1, dim + 1) if dim % n == 0 and n % 8 == 0] or [1]
    return min(counts, key=lambda n: abs(dim / n - 128))


def _layers_from_size(name: str, dim: int, vocab: int, pipeline: int) -> int:
    """Layers of a GPT of so many billion parameters, in whole stages."""
    match = re.search(r"-(\d+(?:\.\d+)?)b", name)
    if match is None:
        raise SkippedRowError("layers is missing")
    layers = (float(match[1]) * 1e9 - vocab * dim) / (12 * dim**2)
    if not 0 < layers <= MOST["layers"]:
        raise SkippedRowError(f"layers is missing, and {name!r} of width {dim} does not say it")
    return max(1, round(layers / pipeline)) * pipeline


def _vocab_from_size(name: str, dim: int, stated: int, layers: int) -> int:
    """A vocabulary that is only stated roughly, from what the layers leave of the model's size."""
    match = re.search(r"-(\d+(?:\.\d+)?)b", name)
    left = float(match[1]) * 1e9 - 12 * layers * dim**2 if match else 0.0
    implied = left / dim
    return round(implied / 1024) * 1024 if stated / 2 < implied < 2 * stated else stated
