"""Adapters leave a checkpoint merged, or as peft loads them, with the same logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from phalanx.checkpoint import Checkpointer, Extra, latest, stored_tensors
from phalanx.checkpoint.tools.convert import MODEL_PREFIX
from phalanx.cli.checkpoints.convert import app
from phalanx.config import Adapter, Job, Model
from phalanx.data import Cursor
from phalanx.model import Transformer, prepare_post_training
from phalanx.model.hf import export_hf
from phalanx.model.post_training.adapters import MARK
from tests.model.small_models import built, small_model

transformers = pytest.importorskip("transformers")
TOKENS = torch.arange(24).view(2, 12) % 61
SHAPES: dict[str, dict[str, Any]] = {"llama": {}, "qwen3": {"qk_norm": True, "head_dim": 16}}


def adapted(config: Model, adapter: Adapter) -> Transformer:
    model = built(config, 12, gain=3.0)
    prepare_post_training(model, Job(model=config, adapter=adapter))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if MARK in name:
                parameter.copy_(torch.randn(parameter.shape) * 0.2)
    return model


def saved(folder: Path, model: Transformer, adapter: Adapter) -> Path:
    tensors = {MODEL_PREFIX + name: each.detach() for name, each in model.state_dict().items()}
    config = {
        "model": msgspec.to_builtins(model.config),
        "adapter": msgspec.to_builtins(adapter),
        "data": {"sequence": 12},
        "checkpoint": {"load_hf": "some/base"},
    }
    extra = Extra(tokens=0, cursor=Cursor(), mesh={}, config_hash="", config=config)
    return Checkpointer(folder).save(5, tensors, extra)


def convert(*arguments: object) -> Any:
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def their_logits(folder: Path, adapters: Path | None = None) -> Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapters is not None:
        peft = pytest.importorskip("peft")
        model = peft.PeftModel.from_pretrained(model, adapters)
    model.eval()
    with torch.no_grad():
        logits: Tensor = model(TOKENS).logits
    return logits


CASES = [
    ("llama", Adapter(kind="lora", rank=3)),
    ("llama", Adapter(kind="dora", rank=3)),
    ("qwen3", Adapter(kind="lora", rank=4, alpha=3.0, targets=("q_proj", "v_proj", "up_proj"))),
]


@pytest.mark.parametrize(("shape", "adapter"), CASES, ids=["lora", "dora", "some"])
def test_peft_and_a_merged_model_have_our_logits(
    shape: str, adapter: Adapter, tmp_path: Path
) -> None:
    config = small_model(**SHAPES[shape])
    model = adapted(config, adapter)
    checkpoint = saved(tmp_path / "checkpoints", model, adapter)
    base = {n: t for n, t in model.state_dict().items() if MARK not in n}
    export_hf(base, config, tmp_path / "base", dtype=torch.float32)
    with torch.no_grad():
        expected = model(TOKENS)
    convert("export-peft", checkpoint, tmp_path / "peft")
    said = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert said["base_model_name_or_path"] == "some/base"
    found = their_logits(tmp_path / "base", tmp_path / "peft")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (their_logits(tmp_path / "base") - expected).abs().max() > 0.05
    convert("export-hf", checkpoint, tmp_path / "hf", "--dtype", "float32")
    found = their_logits(tmp_path / "hf")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_merged_checkpoint_is_one_of_the_plain_model(tmp_path: Path) -> None:
    adapter = Adapter(kind="dora", rank=3)
    config = small_model()
    model = adapted(config, adapter)
    made = convert("merge", saved(tmp_path / "checkpoints", model, adapter), tmp_path / "merged")
    path = latest(tmp_path / "merged")
    assert made == {"checkpoint": str(path)} and path is not None
    plain = Transformer(config)
    tensors = {MODEL_PREFIX + name: each for name, each in plain.state_dict().items()}
    assert stored_tensors(path).keys() == tensors.keys()
    manifest = Checkpointer(tmp_path / "merged").load(path, tensors)
    assert "adapter" not in manifest.config
    plain.prepare(torch.arange(12))
    with torch.no_grad():
        torch.testing.assert_close(plain(TOKENS), model(TOKENS), rtol=1e-4, atol=1e-4)


def test_a_checkpoint_without_adapters_is_refused(tmp_path: Path) -> None:
    plain = built(small_model(), 12)
    checkpoint = saved(tmp_path / "checkpoints", plain, Adapter())
    for command in ("merge", "export-peft"):
        done = CliRunner().invoke(app, [command, str(checkpoint), str(tmp_path / "out")])
        assert done.exit_code != 0
        assert "has no adapters" in done.output.replace("\n", " ")
