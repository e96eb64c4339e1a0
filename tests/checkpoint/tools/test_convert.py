"""Checkpoints to Hugging Face folders and back, as the command line does it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from msgspec import structs
from typer.testing import CliRunner

from phalanx.checkpoint import Checkpointer, Extra, latest
from phalanx.checkpoint.tools.convert import MODEL_PREFIX
from phalanx.cli.checkpoints.convert import app
from phalanx.config import Model, Moe, resolve_model
from phalanx.data import Cursor
from phalanx.model import Transformer
from phalanx.model.hf import HfError, compare, config_from_hf, load_hf
from phalanx.model.hf.compare import compare_logits
from tests.limits import file_size_limit

MODEL = resolve_model(
    Model(
        dim=32,
        layers=2,
        heads=4,
        kv_heads=2,
        ffn=48,
        vocab=64,
        qk_norm=True,
        moe=Moe(experts=4, top_k=2, ffn=32, first_dense_layers=1),
    )
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A trainer's checkpoint: weights beside optimizer state."""
    torch.manual_seed(0)
    state = Transformer(MODEL).state_dict()
    tensors = {MODEL_PREFIX + fqn: torch.randn(t.shape) for fqn, t in state.items()}
    tensors["optimizer.moment.embed.weight"] = torch.randn(64, 32)
    config = {"model": msgspec.to_builtins(MODEL), "data": {"sequence": 123}}
    extra = Extra(tokens=0, cursor=Cursor(), mesh={}, config_hash="", config=config)
    return Checkpointer(tmp_path / "checkpoints").save(5, tensors, extra)


def test_weights_survive_export_and_import_bit_for_bit(checkpoint: Path, tmp_path: Path) -> None:
    run = CliRunner().invoke
    folder = tmp_path / "hf"
    done = run(app, ["export-hf", str(checkpoint), str(folder), "--dtype", "float32", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["dtype"] == "float32"
    assert "those of transformers" in json.loads(done.stdout)["logits"]
    assert json.loads((folder / "config.json").read_text())["max_position_embeddings"] == 123
    done = run(app, ["import-hf", str(folder), str(tmp_path / "imported"), "--json"])
    assert done.exit_code == 0, done.output
    imported = latest(tmp_path / "imported")
    assert json.loads(done.stdout)["checkpoint"] == str(imported)
    assert imported is not None
    expected = dict(load_hf(folder))
    original, again = (
        {MODEL_PREFIX + fqn: torch.zeros_like(tensor) for fqn, tensor in expected.items()}
        for _ in range(2)
    )
    Checkpointer(tmp_path).load(checkpoint, original)
    Checkpointer(tmp_path).load(imported, again)
    assert all(torch.equal(original[key], again[key]) for key in original)


def test_an_export_that_transformers_computes_otherwise_is_not_called_good(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "hf"
    command = ["export-hf", str(checkpoint), str(folder)]
    assert CliRunner().invoke(app, [*command, "--no-compare"]).exit_code == 0
    assert "those of transformers" in compare_logits(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.1}))
    ours = config_from_hf(folder)
    monkeypatch.setattr(compare, "config_from_hf", lambda _: structs.replace(ours, norm_eps=1e-5))
    with pytest.raises(HfError, match="transformers computes other logits"):
        compare_logits(folder)
    monkeypatch.setattr(compare, "MEMORY_SHARE", 0.0)
    assert "not compared: that takes" in compare_logits(folder)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "not compared: transformers is not installed" in compare_logits(folder)


def test_a_folder_that_is_no_checkpoint_ends_in_words_and_its_exit_code(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["export-hf", str(tmp_path), str(tmp_path / "out")])
    assert done.exit_code == 15
    assert "no readable manifest.json" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_run_stands_for_its_newest_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app, ["export-hf", str(tmp_path), str(tmp_path / "out"), "--no-compare", "--json"]
    )
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["checkpoint"] == str(checkpoint)


def test_an_export_that_does_not_fit_on_the_disk_leaves_nothing(
    checkpoint: Path, tmp_path: Path
) -> None:
    command = ["export-hf", str(checkpoint), str(tmp_path / "out"), "--no-compare", "--json"]
    with file_size_limit(4096):
        done = CliRunner().invoke(app, command)
    assert done.exit_code == 15, done.output
    assert "cannot be written" in json.loads(done.stdout)["error"]
    assert list((tmp_path / "out").iterdir()) == []
    assert CliRunner().invoke(app, command).exit_code == 0


def test_an_export_into_a_file_ends_in_words(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = CliRunner().invoke(app, ["export-hf", str(checkpoint), str(tmp_path / "file")])
    assert done.exit_code == 15 and "cannot be written" in done.stderr


def test_an_unknown_architecture_ends_in_words(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    done = CliRunner().invoke(app, ["import-hf", str(tmp_path), str(tmp_path / "out")])
    assert done.exit_code == 15 and "model_type = 'bert' is not supported" in done.stderr
