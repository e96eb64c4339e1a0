"""The partition of Muon's matrices is kept with a run."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from phalanx.train.optim.muon import MuonPartition
from phalanx.train.optim.muon.partition import PartitionRecord
from phalanx.train.parity.prove import make_trainer
from phalanx.train.report.run_folder import RunFolder
from tests.parallel.test_parity import make_job


def begun(kind: str, folder: Path) -> list[Path]:
    """Files that the callback writes for a run of one process."""
    job = make_job(1, {"model": {"layers": 1}, "optimizer": {"kind": kind}})
    run: Any = SimpleNamespace(trainer=make_trainer(job), folder=RunFolder(folder))
    run.folder.provenance.mkdir(exist_ok=True)
    MuonPartition().begin(run)
    run.trainer.close()
    return list(run.folder.provenance.iterdir())


def test_every_matrix_is_named_with_its_rank(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    (path,) = begun("muon", tmp_path)
    assert path.name == "muon-0.json"
    kept = msgspec.json.decode(path.read_bytes(), type=PartitionRecord)
    assert {each.rank for each in kept.matrices} == {0} and kept.work == (1.0,)
    names = [each.parameter for each in kept.matrices]
    assert names.count("layers.0.attention.qkv.weight") == 3  # queries, keys and values
    assert "Muon orthogonalises 7 matrices" in caplog.text


def test_other_optimizers_leave_nothing(tmp_path: Path) -> None:
    assert begun("adamw", tmp_path) == []
