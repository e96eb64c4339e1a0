"""A checkpoint becomes a model that computes, whatever mesh wrote it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from phalanx.checkpoint import Checkpointer, CheckpointError
from phalanx.checkpoint.format.tier import open_source
from phalanx.checkpoint.tools.convert import extra_of
from phalanx.checkpoint.tools.rewrite import write_whole
from phalanx.config import Job, job_from_table, resolve
from phalanx.parallel import build_mesh
from phalanx.train.evaluate.loaded import load_model
from phalanx.train.trainer import Trainer
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


def test_a_checkpoint_that_names_no_model_is_refused(tmp_path: Path, checkpoint: Path) -> None:
    import msgspec

    extra = msgspec.structs.replace(extra_of(open_source(checkpoint).manifest), config={})
    path = write_whole(tmp_path, 1, [("model.x", torch.zeros(1))], extra)
    with pytest.raises(CheckpointError, match="does not say which model"):
        load_model(path, torch.float32, CPU)
