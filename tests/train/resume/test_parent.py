"""Which checkpoint a path means."""

from __future__ import annotations

from pathlib import Path

import torch

from phalanx.checkpoint import Checkpointer, Extra
from phalanx.data import Cursor
from phalanx.train.resume.parent import checkpoint_at

EXTRA = Extra(tokens=1, cursor=Cursor(), mesh={}, config_hash="h")


def test_a_checkpoint_is_named_by_itself_its_run_or_the_name_of_its_runs(tmp_path: Path) -> None:
    runs, newest = tmp_path / "runs", tmp_path / "runs/lora/20260102"
    for run in ("20260101", "20260102"):
        folder = runs / "lora" / run / "checkpoints"
        for step in (1, 2):
            Checkpointer(folder).save(step, {"model.x": torch.zeros(2)}, EXTRA)
    expected = newest / "checkpoints/step-00000002"
    for named in (expected, newest / "checkpoints", newest, runs / "lora"):
        assert checkpoint_at(named) == expected
    assert checkpoint_at(tmp_path / "nowhere") == tmp_path / "nowhere"
