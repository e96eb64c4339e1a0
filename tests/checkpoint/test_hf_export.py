"""An exported folder is whole: transformers opens its tokenizer and model, and anybody reads it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest
import torch

from phalanx.checkpoint import Extra
from phalanx.checkpoint.tools.convert import complete_export, export_checkpoint
from phalanx.checkpoint.tools.rewrite import write_whole
from phalanx.config import Model, resolve_model
from phalanx.data import Cursor
from phalanx.data.tokenize.run import tokenize_files
from phalanx.data.tokenize.vocabulary import train_tokenizer
from phalanx.model import Transformer
from phalanx.model.hf import HfError


@pytest.fixture
def exported(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint of a run on a corpus, and its exported folder."""
    text = tmp_path / "a.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 50)
    tokenizer = train_tokenizer([text], 300)
    tokenize_files([text], tokenizer, tmp_path / "corpus")
    model = resolve_model(Model(dim=64, layers=1, heads=2, ffn=128, vocab=300))
    config = {
        "model": msgspec.to_builtins(model),
        "data": {"source": "shards", "path": str(tmp_path / "corpus"), "sequence": 64},
    }
    extra = Extra(tokens=0, cursor=Cursor(), mesh={}, config_hash="", config=config)
    weights = ((f"model.{name}", each) for name, each in Transformer(model).state_dict().items())
    path = write_whole(tmp_path / "run", 1, weights, extra)
    export_checkpoint(path, tmp_path / "hf", torch.float32, 10**9)
    return path, tmp_path / "hf"


def test_transformers_opens_the_tokenizer_and_generates(exported: tuple[Path, Path]) -> None:
    path, folder = exported
    assert "corpus" in complete_export(path, folder)
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("the quick brown fox")["input_ids"]) == "the quick brown fox"
    assert tokenizer.eos_token == "<|endoftext|>" and tokenizer.model_max_length == 64
    ends = transformers.GenerationConfig.from_pretrained(folder).eos_token_id
    assert (
        ends
        == tokenizer.eos_token_id
        == json.loads((folder / "config.json").read_text())["eos_token_id"]
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    asked = tokenizer("the quick", return_tensors="pt")
    assert model.generate(**asked, max_new_tokens=2).shape[1] > asked["input_ids"].shape[1]


def test_every_file_has_the_mode_of_a_new_one(exported: tuple[Path, Path]) -> None:
    path, folder = exported
    complete_export(path, folder)
    mask = os.umask(0)
    os.umask(mask)
    modes = {each.name: each.stat().st_mode & 0o777 for each in folder.iterdir()}
    assert set(modes.values()) == {0o666 & ~mask}, modes


def test_a_tokenizer_can_be_given_and_its_absence_is_said(
    exported: tuple[Path, Path], tmp_path: Path
) -> None:
    path, folder = exported
    corpus = tmp_path / "corpus"
    corpus.rename(tmp_path / "moved")
    assert "give --tokenizer" in complete_export(path, folder)
    assert (folder / "generation_config.json").exists()
    complete_export(path, folder, tmp_path / "moved" / "tokenizer.json")
    assert (folder / "tokenizer.json").exists()
    with pytest.raises(HfError, match="cannot be used as a tokenizer"):
        complete_export(path, folder, tmp_path / "a.txt")
