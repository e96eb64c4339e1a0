"""A run starts where its configuration says, or says why it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from phalanx.checkpoint import Checkpointer, Extra
from phalanx.config import ConfigError, Job
from phalanx.data import Cursor
from phalanx.model.hf import HfError, export_hf
from phalanx.parallel import build_mesh
from phalanx.train.parent import find_parent
from phalanx.train.resume import load_foreign_weights
from phalanx.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.train.forked_runs import small_job


def save(folder: Path, step: int) -> Path:
    extra = Extra(tokens=0, cursor=Cursor(), mesh={}, config_hash="")
    return Checkpointer(folder, keep=0).save(step, {"x": torch.ones(2)}, extra)


def test_auto_without_any_checkpoint_is_a_fresh_start(tmp_path: Path) -> None:
    assert find_parent(small_job(tmp_path, checkpoint__resume="auto")) is None


def test_auto_takes_the_newest_of_the_name_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "try" / "a" / "checkpoints", 40)
    save(tmp_path / "other" / "b" / "checkpoints", 90)
    newer = save(tmp_path / "try" / "c" / "checkpoints", 50)
    assert find_parent(small_job(tmp_path, checkpoint__resume="auto")) == newer


def test_auto_passes_over_a_damaged_checkpoint(tmp_path: Path) -> None:
    good = save(tmp_path / "try" / "a" / "checkpoints", 40)
    bad = save(tmp_path / "try" / "b" / "checkpoints", 50)
    (bad / "manifest.json").write_text("{")
    assert find_parent(small_job(tmp_path, checkpoint__resume="auto")) == good


def test_a_run_folder_stands_for_its_newest_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "run" / "checkpoints", 1)
    newest = save(tmp_path / "run" / "checkpoints", 2)
    assert find_parent(small_job(tmp_path, checkpoint__resume=tmp_path / "run")) == newest


def test_a_folder_without_checkpoint_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    newest = save(tmp_path / "try" / "a" / "checkpoints", 40)
    with pytest.raises(ConfigError, match=r"checkpoint\.resume") as caught:
        find_parent(small_job(tmp_path, checkpoint__resume=tmp_path / "none"))
    assert str(newest) in str(caught.value)


def _trainer(job: Job) -> Trainer:
    device = torch.device("cpu")
    return Trainer(job, build_mesh(job, device), device)


def _load_and_collect(job: Job, folder: Path) -> dict[str, torch.Tensor]:
    trainer = _trainer(job)
    load_foreign_weights(trainer, folder)
    trainer.close()
    return {w.name: w.parameter.full_tensor().detach() for w in trainer.engine.weights}  # type: ignore[attr-defined]


@pytest.mark.parametrize("tensor", [1, 2])
def test_foreign_weights_arrive_whole_on_any_mesh(tmp_path: Path, tensor: int) -> None:
    source = _trainer(small_job(tmp_path, 1, train__seed=5))
    source.close()
    written = {w.name: w.master.clone() for w in source.engine.weights}
    export_hf(written, source.job.model, tmp_path / "hf", dtype=torch.float32)
    world = 2 * tensor
    job = small_job(tmp_path, world, parallel__tensor=tensor)
    for found in run_ranks(world, _load_and_collect, job, tmp_path / "hf"):
        assert found.keys() == written.keys()
        for name, whole in found.items():
            assert torch.equal(whole, written[name]), name


def test_foreign_weights_of_another_shape_are_refused_by_name(tmp_path: Path) -> None:
    source = _trainer(small_job(tmp_path, 1))
    source.close()
    written = {w.name: w.master for w in source.engine.weights}
    export_hf(written, source.job.model, tmp_path / "hf", dtype=torch.float32)
    other = _trainer(small_job(tmp_path, 1, model__ffn=64))
    other.close()
    with pytest.raises(HfError, match=r"layers\.0\.mlp\.gate_up\.weight"):
        load_foreign_weights(other, tmp_path / "hf")
