"""Checkpoints on a real GPU: copies that run beside training are those of the step they name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from phalanx.checkpoint import Checkpointer, latest
from phalanx.checkpoint.keeper import background
from phalanx.checkpoint.keeper.start import home_of
from phalanx.config import Job, check, job_from_table, resolve
from phalanx.parallel import build_mesh
from phalanx.train.trainer import Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STEPS, SAVED = 6, 3


@pytest.fixture(autouse=True)
def group(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.use_deterministic_algorithms(False)


def make_job() -> Job:
    table = {
        "model": {"dim": 1024, "layers": 4, "heads": 8, "ffn": 4096, "vocab": 4096},
        "data": {"sequence": 256, "prefetch": 0},
        "train": {
            "steps": STEPS,
            "global_batch": 2,
            "micro_batch": 2,
            "compile": "off",
            "deterministic": True,
        },
    }
    job = resolve(job_from_table(table), 1)
    check(job, 1)
    return job


def make_trainer() -> Trainer:
    job, device = make_job(), torch.device("cuda", 0)
    return Trainer(job, build_mesh(job, device), device)


def prepared(trainer: Trainer, folder: Path, home: Path) -> Checkpointer:
    checkpointer = Checkpointer(folder, keep=2)
    assert checkpointer.prepare_background(
        trainer.tensors(),
        generation=0,
        step=0,
        device=trainer.device,
        lease_seconds=20.0,
        home=home,
        overlap=True,
    )
    return checkpointer


def snapshot(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.tensors().items()}


def train_saving_in_the_middle(trainer: Trainer, checkpointer: Checkpointer) -> None:
    while trainer.step < STEPS:
        trainer.train_step(before_update=checkpointer.before_update)
        checkpointer.poll()
        if trainer.step == SAVED:
            checkpointer.save(trainer.step, trainer.tensors(), trainer.extra())


def test_a_copy_beside_training_is_of_its_step_and_training_continues_to_the_bit(
    tmp_path: Path,
) -> None:
    home = home_of(str(tmp_path))
    whole = make_trainer()
    checkpointer = prepared(whole, tmp_path / "checkpoints", home)
    train_saving_in_the_middle(whole, checkpointer)
    checkpointer.finish()
    checkpointer.close()
    path = latest(tmp_path / "checkpoints")
    assert path is not None
    resumed = make_trainer()
    resumed.restore(Checkpointer(tmp_path / "checkpoints").load(path, resumed.tensors()))
    assert resumed.step == SAVED
    while resumed.step < STEPS:
        resumed.train_step()
    expected = snapshot(whole)
    for name, tensor in snapshot(resumed).items():
        assert torch.equal(tensor, expected[name]), name


def test_a_killed_worker_is_continued_from_the_keepers_memory(tmp_path: Path) -> None:
    home = home_of(str(tmp_path))
    trainer = make_trainer()
    checkpointer = prepared(trainer, tmp_path / "checkpoints", home)
    for _ in range(SAVED):
        trainer.train_step()
    checkpointer.save(trainer.step, trainer.tensors(), trainer.extra())
    checkpointer.finish()
    expected = snapshot(trainer)
    checkpointer.abandon()  # as if killed: the connection ends without a word
    for path in (tmp_path / "checkpoints").glob("step-*/rank-*"):
        path.unlink()  # only the memory is left
    resumed = make_trainer()
    manifest = Checkpointer(tmp_path / "checkpoints").load_memory(home, resumed.tensors())
    assert manifest is not None and manifest.step == SAVED
    resumed.restore(manifest)
    for name, tensor in snapshot(resumed).items():
        assert torch.equal(tensor, expected[name]), name
    attachment = checkpointer._attachment
    assert attachment is not None and attachment._process is not None
    attachment._process.kill()
    attachment._process.wait()


def test_the_memory_of_snapshots_is_pinned(tmp_path: Path) -> None:
    trainer = make_trainer()
    checkpointer = prepared(trainer, tmp_path / "checkpoints", home_of(str(tmp_path)))
    assert checkpointer._background is not None
    _, memory = checkpointer._background._kept.buffer()
    assert memory.is_pinned()
    checkpointer.close()


def test_a_copy_makes_few_marks_and_the_next_one_uses_them_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "MARK_BYTES", 1)
    trainer = make_trainer()
    trainer.train_step()
    checkpointer = prepared(trainer, tmp_path / "checkpoints", home_of(str(tmp_path)))
    made = []
    for step in (1, 2):
        checkpointer.save(step, trainer.tensors(), trainer.extra())
        checkpointer.finish()
        assert checkpointer._background is not None
        made.append(list(checkpointer._background._events))
    checkpointer.close()
    assert 2 <= len(made[0]) <= background.MOST_MARKS
    assert made[1] == made[0]
