"""Samples that cannot be read are counted in every step's record, whoever was to read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.config import Job
from phalanx.parallel import build_mesh
from phalanx.train.report.progress import figures
from phalanx.train.report.records import StepRecord
from phalanx.train.trainer import Trainer
from tests.data.corpora import write_corpus
from tests.parallel.test_parity import make_job
from tests.ranks import run_ranks
from tests.train.forked_runs import Run, small_job

MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp3": (3, {"zero": 3}),
    "tp2xfsdp2": (4, {"tensor": 2}),
    "pp2": (2, {"pipeline": 2}),
}


def damaged_corpus(folder: Path) -> str:
    """64 samples of 32 tokens, of which a flipped byte spoils a block of four or five."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("phalanx.data.corpus.writer.BLOCK_BYTES", 256)
        write_corpus(folder, 64 * 32 + 1, vocab=64)
    shard = folder / "shard-00000.bin"
    content = bytearray(shard.read_bytes())
    content[1000] ^= 1
    shard.write_bytes(content)
    return str(folder)


def count_damaged(job: Job) -> list[int]:
    trainer = Trainer(job, build_mesh(job, torch.device("cpu")), torch.device("cpu"))
    counts = [trainer.train_step().damaged for _ in range(job.train.steps)]
    trainer.close()
    return counts


@pytest.fixture(scope="module")
def sections(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    path = damaged_corpus(tmp_path_factory.mktemp("damaged"))
    data = {"source": "shards", "path": path, "on_damage": "weightless"}
    # Eight steps of eight samples are one epoch.
    return {"data": data, "train": {"steps": 8, "micro_batch": 2}, "model": {"layers": 2}}


@pytest.fixture(scope="module")
def alone(sections: dict[str, dict[str, Any]]) -> list[int]:
    return count_damaged(make_job(1, sections))


@pytest.mark.parametrize("name", MESHES)
def test_every_mesh_counts_the_same_damaged_samples(
    name: str, sections: dict[str, dict[str, Any]], alone: list[int]
) -> None:
    assert 4 <= sum(alone) <= 6
    ranks, parallel = MESHES[name]
    job = make_job(ranks, sections | {"parallel": parallel})
    assert run_ranks(ranks, count_damaged, job) == [alone] * ranks


def test_a_run_tells_of_its_damaged_samples(tmp_path: Path) -> None:
    settings = {"path": damaged_corpus(tmp_path / "corpus"), "source": "shards", "sequence": 32}
    job = small_job(
        tmp_path,
        2,
        train__steps=16,
        data__on_damage="weightless",
        **{f"data__{key}": value for key, value in settings.items()},
    )
    run = Run(job)
    assert run.wait() == 0
    records: list[StepRecord] = run.steps
    total = sum(record.damaged for record in records)
    assert 4 <= total <= 6
    for record in records:
        assert (f"damaged {record.damaged}" in figures(record)) == (record.damaged > 0)
        if record.damaged:
            assert f"step {record.step}/16  {figures(record)}" in run.text
    assert f"damaged_samples: {total}" in run.text
