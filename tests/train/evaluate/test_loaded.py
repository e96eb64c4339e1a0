"""A checkpoint becomes a model that computes, whatever mesh wrote it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from phalanx.checkpoint import Checkpointer, CheckpointError
from phalanx.checkpoint.format.tier import open_source
from phalanx.checkpoint.tools.adapters import merge_checkpoint
from phalanx.checkpoint.tools.convert import extra_of
from phalanx.checkpoint.tools.rewrite import write_whole
from phalanx.config import Job, job_from_table, resolve
from phalanx.parallel import build_mesh
from phalanx.parallel.weight import local_part
from phalanx.train.evaluate.loaded import load_model
from phalanx.train.parity.prove import make_steps, make_trainer
from phalanx.train.trainer import Trainer
from tests.parallel.test_parity import EXPERTS
from tests.parallel.test_parity import make_job as make_parity_job
from tests.shared_ranks import SharedRanks
from tests.train.evaluate.small_checkpoint import make_checkpoint, opened

CPU = torch.device("cpu")
MESHES = ({"tensor": 2}, {"pipeline": 2}, {"zero": 3}, {"expert": 2})
SHAPE = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 64, "vocab": 64}


def make_job(ranks: int, parallel: dict[str, int]) -> Job:
    moe = {"experts": 4, "top_k": 2, "ffn": 32, "balance": "bias"}
    table = {
        "model": {**SHAPE, "moe": moe},
        "data": {"sequence": 16, "prefetch": 0},
        "precision": {"compute": "float32"},
        "train": {"steps": 1, "global_batch": 4, "device": "cpu"},
        "parallel": parallel,
    }
    return resolve(job_from_table(table), ranks)


def save(job: Job, folder: Path) -> None:
    trainer = Trainer(job, build_mesh(job, CPU), CPU)
    for part in trainer.engine.parts:
        for name, module in part.named_modules():
            if name.endswith("router"):
                module.expert_bias.copy_(torch.arange(4.0))  # type: ignore[operator, union-attr]
    checkpointer = Checkpointer(folder)
    checkpointer.save(1, trainer.tensors(), trainer.extra())
    checkpointer.close()
    trainer.close()


def test_every_mesh_writes_the_same_model(tmp_path: Path, shared_ranks: SharedRanks) -> None:
    save(make_job(1, {}), tmp_path / "alone")
    expected = opened(tmp_path / "alone" / "step-00000001").model.state_dict()
    for number, axes in enumerate(MESHES):
        folder = tmp_path / str(number)
        shared_ranks.run(2, save, make_job(2, axes), folder)
        loaded = opened(folder / "step-00000001")
        assert loaded.step == 1 and loaded.sequence == 16
        for name, weight in loaded.model.state_dict().items():
            assert torch.equal(weight, expected[name]), (axes, name)
        biases = {n: m.expert_bias for n, m in loaded.model.named_modules() if n.endswith("router")}
        assert all(torch.equal(bias, torch.arange(4.0)) for bias in biases.values())  # type: ignore[arg-type]


def save_trained(job: Job, folder: Path, steps: int = 2) -> dict[str, Tensor]:
    """Some steps; the weights that are evaluated, of one process."""
    trainer = make_trainer(job)
    make_steps(trainer, steps)
    checkpointer = Checkpointer(folder)
    checkpointer.save(steps, trainer.tensors(), trainer.extra())
    checkpointer.close()
    with trainer.optimizer.evaluated(), trainer.average.evaluated():
        found = {weight.name: weight.master.clone() for weight in trainer.engine.weights}
    trainer.close()
    return found


def scored(folder: Path) -> dict[str, Tensor]:
    """Weights as a rank of two has them."""
    model = opened(folder / "step-00000002", tensor=2).model
    return {name: local_part(weight).clone() for name, weight in model.named_parameters()}


def test_of_schedule_free_the_mean_is_evaluated(tmp_path: Path, shared_ranks: SharedRanks) -> None:
    sections = {"optimizer": {"kind": "schedule-free"}, "schedule": {"kind": "constant"}}
    expected = save_trained(make_parity_job(1, sections), tmp_path)
    model = opened(tmp_path / "step-00000002").model
    for name, weight in model.named_parameters():
        assert torch.equal(weight, expected[name]), name
    halves = shared_ranks.run(2, scored, tmp_path)
    name = "layers.0.attention.qkv.weight"
    assert torch.equal(torch.cat([half[name] for half in halves]), expected[name])


def test_adapters_are_merged_first(tmp_path: Path) -> None:
    save_trained(make_parity_job(1, {"adapter": {"kind": "lora"}}), tmp_path)
    with pytest.raises(CheckpointError, match="merge them first with `phalanx convert merge`"):
        opened(tmp_path / "step-00000002")
    merged = merge_checkpoint(tmp_path / "step-00000002", tmp_path / "merged")
    assert opened(merged).step == 0


def test_one_matrix_serves_as_embedding_and_head(tmp_path: Path, corpus: Path) -> None:
    model = opened(make_checkpoint(tmp_path, corpus, tied_embedding=True)).model
    assert model.head is not None and model.embed is not None
    assert model.head.weight is model.embed.weight


def test_the_tokenizer_is_that_of_the_corpus_or_the_one_given(
    checkpoint: Path, corpus: Path
) -> None:
    codec = opened(checkpoint).codec
    assert codec is not None and codec.path == corpus / "tokenizer.json"
    assert codec.decode(codec.encode("the quick fox")) == "the quick fox"
    assert codec.end == codec.start == 0
    given = opened(checkpoint, tokenizer=corpus).codec
    assert given is not None and given.end == 0


def test_a_tensor_that_the_model_has_no_place_for_is_refused(
    tmp_path: Path, checkpoint: Path
) -> None:
    extra = extra_of(open_source(checkpoint).manifest)
    weights = {f"model.{n}": w for n, w in opened(checkpoint).model.state_dict().items()}
    weights["model.layers.0.adapter"] = torch.zeros(2)
    path = write_whole(tmp_path, 1, weights.items(), extra)
    with pytest.raises(CheckpointError, match=r"has no layers\.0\.adapter"):
        opened(path)


def test_the_moving_average_takes_the_place_of_the_weights(tmp_path: Path) -> None:
    """Selection biases of experts are no weights, and as they are."""
    moe = {**EXPERTS, "balance": "bias", "bias_rate": 0.01}
    ema = {"ema": {"decay": 0.5, "validate": True}}
    job = make_parity_job(1, {"model": {"layers": 1, "moe": moe}, "train": ema})
    expected, path = save_trained(job, tmp_path, steps=1), tmp_path / "step-00000001"
    weights, average = opened(path).model, opened(path, average=True).model
    moved = dict(weights.named_parameters())
    for name, parameter in average.named_parameters():
        assert torch.equal(parameter, expected[name])
        assert not torch.equal(parameter, moved[name])
    biases = {name: value for name, value in weights.named_buffers() if "expert_bias" in name}
    assert biases and all(value.any() for value in biases.values())
    for name, value in average.named_buffers():
        assert name not in biases or torch.equal(value, biases[name])


def test_an_average_that_is_not_there_is_refused(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no average of the weights"):
        opened(checkpoint, average=True)


def test_a_checkpoint_that_names_no_model_is_refused(tmp_path: Path, checkpoint: Path) -> None:
    import msgspec

    extra = msgspec.structs.replace(extra_of(open_source(checkpoint).manifest), config={})
    path = write_whole(tmp_path, 1, [("model.x", torch.zeros(1))], extra)
    with pytest.raises(CheckpointError, match="does not contain the model's settings"):
        load_model(path, torch.float32, CPU)
