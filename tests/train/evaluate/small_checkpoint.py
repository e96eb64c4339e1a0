"""A checkpoint of a small model that was never trained, with its corpus and tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch

from phalanx.checkpoint import Extra
from phalanx.checkpoint.tools.rewrite import write_whole
from phalanx.config import Model, resolve_model
from phalanx.data import Cursor
from phalanx.data.tokenize.run import tokenize_files
from phalanx.data.tokenize.vocabulary import train_tokenizer
from phalanx.model import Transformer
from phalanx.train.evaluate.loaded import LoadedModel, load_model

SHAPE: dict[str, Any] = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 64, "vocab": 300}
SEQUENCE = 24
TEXTS = (
    "the quick brown fox jumps over the lazy dog",
    "the lazy dog jumps over the quick brown fox, and the fox is not amused: " * 4,
    "über den faulen Hund",
    "a",
)


def make_corpus(folder: Path) -> Path:
    """Token shards of the texts, with the tokenizer that was made of them."""
    lines = folder / "texts.jsonl"
    lines.write_bytes(b"".join(msgspec.json.encode({"text": text}) + b"\n" for text in TEXTS))
    tokenize_files([lines], train_tokenizer([lines], SHAPE["vocab"]), folder / "corpus")
    return folder / "corpus"


def make_checkpoint(folder: Path, corpus: Path, **fields: Any) -> Path:
    """A model that says something of each token, the same every time."""
    config = resolve_model(Model(**{**SHAPE, **fields}))
    model, chance = Transformer(config), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2, generator=chance)
    settings = {
        "model": msgspec.to_builtins(config),
        "data": {"source": "shards", "path": str(corpus), "sequence": SEQUENCE},
    }
    extra = Extra(tokens=0, cursor=Cursor(), mesh={}, config_hash="", config=settings)
    weights = {f"model.{name}": each for name, each in model.state_dict().items()}
    if fields.get("tied_embedding"):
        del weights["model.head.weight"]
    return write_whole(folder, 7, weights.items(), extra)


def opened(checkpoint: Path, **options: Any) -> LoadedModel:
    """The model in fp32 on the CPU."""
    return load_model(checkpoint, torch.float32, torch.device("cpu"), **options)
