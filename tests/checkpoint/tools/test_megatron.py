"""Megatron-core checkpoints in: each form of their tensors, other models refused, real ones."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from msgspec import structs
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp
from typer.testing import CliRunner

from phalanx.checkpoint import CheckpointError
from phalanx.checkpoint.format.tier import open_source
from phalanx.checkpoint.read.load import StoredTensors
from phalanx.checkpoint.tools.convert import MODEL_PREFIX, LazyTensors
from phalanx.checkpoint.tools.dcp import import_dcp
from phalanx.checkpoint.tools.megatron import TRACKER_FILE, import_megatron
from phalanx.cli.checkpoints.convert import app
from phalanx.config import LatentAttentionShape, Model, Moe, gate_up_groups, resolve_model, to_toml
from phalanx.model import Transformer

WRITER = Path(__file__).with_name("megatron_writer.py")
DENSE = resolve_model(Model(dim=32, layers=2, heads=4, kv_heads=2, ffn=64, vocab=96))
MIXTURE = structs.replace(DENSE, moe=Moe(experts=4, top_k=2, ffn=48))
TOKENS = torch.arange(16)


def stacked(model: Model) -> dict[str, Tensor]:
    """Random weights as Megatron names and stacks them."""
    torch.manual_seed(3)
    layers, dim, ffn = model.layers, model.dim, model.ffn
    rows = (model.heads + 2 * model.kv_heads) * model.head_dim
    layer = "decoder.layers."
    made = {
        "embedding.word_embeddings.weight": torch.randn(128, dim),  # filled up from 96
        layer + "self_attention.linear_qkv.layer_norm_weight": torch.randn(layers, dim),
        layer + "self_attention.linear_qkv.weight": torch.randn(layers, rows, dim),
        layer + "self_attention.linear_proj.weight": torch.randn(layers, dim, dim),
        "decoder.final_layernorm.weight": torch.randn(dim),
        "output_layer.weight": torch.randn(128, dim),
        "optimizer.state.exp_avg.output_layer.weight": torch.randn(128, dim),
    }
    if model.moe is None:
        made[layer + "mlp.linear_fc1.layer_norm_weight"] = torch.randn(layers, dim)
        made[layer + "mlp.linear_fc1.weight"] = torch.randn(layers, 2 * ffn, dim)
        made[layer + "mlp.linear_fc2.weight"] = torch.randn(layers, dim, ffn)
        return made
    experts, ffn = model.moe.experts, model.moe.ffn
    place = layer + "mlp.experts.experts."
    made[layer + "pre_mlp_layernorm.weight"] = torch.randn(layers, dim)
    made[layer + "mlp.router.weight"] = torch.randn(layers, experts, dim)
    made[place + "linear_fc1.weight"] = torch.randn(layers, experts, 2 * ffn, dim)
    made[place + "linear_fc2.weight"] = torch.randn(layers, experts, dim, ffn)
    return made


def alone(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same with each layer, expert, gate and up in a tensor of its own."""
    made: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not name.startswith("decoder.layers."):
            made[name] = tensor
            continue
        for index, part in enumerate(tensor.unbind(0)):
            full = name.replace("decoder.layers.", f"decoder.layers.{index}.")
            before, found, matrix = full.partition("experts.experts.")
            each = enumerate(part.unbind(0)) if found else [(-1, part)]
            for expert, weights in each:
                one = f"{before}{found}{expert}.{matrix}" if found else full
                if one.endswith("linear_fc1.weight"):
                    made[f"{one}_w"], made[f"{one}_v"] = weights.chunk(2)
                else:
                    made[one] = weights
    return {name: tensor.clone() for name, tensor in made.items()}


def written(folder: Path, tensors: dict[str, Tensor]) -> Path:
    save_dcp(tensors, storage_writer=FileSystemWriter(folder), no_dist=True)
    return folder


def read(checkpoint: Path) -> dict[str, Tensor]:
    state = LazyTensors(StoredTensors(open_source(checkpoint)), MODEL_PREFIX)
    return {name: state[name] for name in state}


@pytest.mark.parametrize("model", [DENSE, MIXTURE], ids=["dense", "mixture"])
def test_stacked_and_single_tensors_make_the_same_weights(model: Model, tmp_path: Path) -> None:
    theirs, notes = stacked(model), list[str]()
    run = tmp_path / "run"
    written(run / "iter_0000007", theirs)
    (run / TRACKER_FILE).write_text("7\n")
    first = read(import_megatron(run, tmp_path / "one", model, note=notes.append))
    second = read(import_megatron(written(tmp_path / "b", alone(theirs)), tmp_path / "two", model))
    assert any("32 rows" in note for note in notes) and any("1 entries" in note for note in notes)
    assert first.keys() == second.keys() == Transformer(model).state_dict().keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(first["embed.weight"], theirs["embedding.word_embeddings.weight"][:96])
    qkv = theirs["decoder.layers.self_attention.linear_qkv.weight"]
    assert torch.equal(first["layers.1.attention.qkv.weight"], qkv[1])
    if model.moe is not None:
        gates_and_ups = theirs["decoder.layers.mlp.experts.experts.linear_fc1.weight"]
        assert torch.equal(first["layers.1.moe.experts.gate_up"], gates_and_ups[1])
        assert not first["layers.0.moe.router.expert_bias"].any()
    else:
        gate = theirs["decoder.layers.mlp.linear_fc1.weight"][1][: model.ffn]
        groups = gate_up_groups(model.ffn)
        ours = first["layers.1.mlp.gate_up.weight"].view(groups, 2, -1, model.dim)
        assert torch.equal(ours[:, 0].reshape(model.ffn, model.dim), gate)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layers": 3}, "has 2 layers"),
        ({"layers": 1}, "has 2 layers"),
        ({"ffn": 48}, "of the shape"),
        ({"vocab": 160}, "of the shape"),
        ({"qk_norm": True}, "has no decoder.layers.self_attention.q_layernorm.weight"),
        ({"tied_embedding": True}, "has output_layer.weight"),
        ({"moe": MIXTURE.moe}, "has no decoder.layers.mlp.router.weight"),
        ({"latent": LatentAttentionShape(key_value_rank=8, content_head_dim=8)}, "model.latent"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_weights_of_another_model_are_refused(
    change: dict[str, object], said: str, tmp_path: Path
) -> None:
    folder = written(tmp_path / "megatron", stacked(DENSE))
    with pytest.raises(CheckpointError, match=said):
        import_megatron(folder, tmp_path / "out", structs.replace(DENSE, **change))
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint of Megatron-core"):
        import_megatron(tmp_path, tmp_path / "out", DENSE)
    (tmp_path / TRACKER_FILE).write_text("12")
    with pytest.raises(CheckpointError, match="iter_0000012 has no"):
        import_megatron(tmp_path, tmp_path / "out", DENSE)
    (tmp_path / "iter_0000012" / "mp_rank_00").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="--ckpt-convert-format torch_dist"):
        import_megatron(tmp_path, tmp_path / "out", DENSE)
    other = written(tmp_path / "other", {"weight": torch.zeros(3)})
    with pytest.raises(CheckpointError, match="no GPT model"):
        import_megatron(other, tmp_path / "out", DENSE)


def test_the_command_says_how_to_start_from_it(tmp_path: Path) -> None:
    folder = written(tmp_path / "megatron", stacked(DENSE))
    with pytest.raises(CheckpointError, match="import-megatron"):
        import_dcp(folder, tmp_path / "as dcp")
    job = tmp_path / "job.toml"
    job.write_text(to_toml(DENSE, "model"))
    command = ["import-megatron", str(folder), str(tmp_path / "out"), "--model"]
    done = CliRunner().invoke(app, [*command, str(job)])
    assert done.exit_code == 0, done.output
    assert "weights_only = true" in done.stdout and "dim = 32" in done.stdout
    done = CliRunner().invoke(app, [*command, "llama3-1c"])
    assert done.exit_code == 2 and 'did you mean "llama3-1b"' in done.output


@pytest.mark.soak
@pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core: make soak has it")
@pytest.mark.parametrize("kind", ["dense", "mixture", "dense-split", "mixture-alone"])
def test_logits_are_those_of_megatron(kind: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(WRITER), kind, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    shape = json.loads((tmp_path / "shape.json").read_text())
    moe = Moe(**shape.pop("moe")) if "moe" in shape else None
    model = resolve_model(Model(**shape, moe=moe))
    path = import_megatron(tmp_path / "checkpoint", tmp_path / "out", model)
    ours = Transformer(model).eval()
    ours.load_state_dict(read(path))
    ours.prepare(TOKENS)
    theirs = torch.load(tmp_path / "logits.pt", weights_only=True)
    with torch.no_grad():
        logits = ours(theirs["tokens"])
    assert (logits - theirs["logits"]).abs().max() < 1e-5 * theirs["logits"].abs().max()
