"""A job that is cancelled, in whatever phase: it ends at once, and nothing of it stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.checkpoint.format.folder import scan
from tests.faults.trial import SHORT_STEPS, Phase, Trial, trial_cluster

ENDED_SECONDS = 20.0  # on a busy machine


def cancel_in(tmp_path: Path, phase: Phase) -> Trial:
    with trial_cluster(tmp_path) as cluster:
        trial = Trial(cluster, tmp_path, steps=SHORT_STEPS)
        with trial.phase(phase):
            cluster.command("cancel", str(trial.job))
        assert cluster.wait_ended(trial.job, ENDED_SECONDS) == "cancelled", trial.story()
        trial.leaves_nothing()
        return trial


def test_a_save_that_a_cancel_interrupts_takes_its_folder_with_it(tmp_path: Path) -> None:
    trial = cancel_in(tmp_path, Phase.FLUSHING)
    assert all(found.complete for found in scan(trial.folder / "checkpoints"))


@pytest.mark.soak
@pytest.mark.parametrize("phase", [each for each in Phase if each is not Phase.FLUSHING])
def test_a_job_that_is_cancelled_leaves_nothing(tmp_path: Path, phase: Phase) -> None:
    cancel_in(tmp_path, phase)
