"""Every process, killed or stopped for half a minute, in every phase of a job."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.trial import Phase, Process, Trial, trial_cluster

STOPPED_SECONDS = 30.0
KILLED_SECONDS = 40.0  # to go on in, on a busy machine
TABLE = [(process, phase) for process in Process for phase in Phase]
# In the normal suite; all others are soak tests.
SHORT = {
    (Process.WORKER, Phase.FORMING),
    (Process.KEEPER, Phase.FLUSHING),
}


def cell(process: Process, phase: Phase, marks: bool = True) -> object:
    soak = [pytest.mark.soak] if marks and (process, phase) not in SHORT else []
    return pytest.param(process, phase, id=f"{process}-{phase}", marks=soak)


@pytest.mark.parametrize(("process", "phase"), [cell(*each) for each in TABLE])
def test_whatever_is_killed_the_job_ends_as_if_nothing_happened(
    tmp_path: Path, expected: Path, process: Process, phase: Phase
) -> None:
    with trial_cluster(tmp_path) as cluster:
        trial = Trial(cluster, tmp_path)
        with trial.phase(phase):
            trial.kill(process)
        trial.goes_on(KILLED_SECONDS)
        trial.ends_like(expected)
        trial.leaves_nothing()


@pytest.mark.soak
@pytest.mark.parametrize(("process", "phase"), [cell(*each, False) for each in TABLE])
def test_whatever_stands_still_the_job_ends_as_if_nothing_happened(
    tmp_path: Path, expected: Path, process: Process, phase: Phase
) -> None:
    with trial_cluster(tmp_path) as cluster:
        trial = Trial(cluster, tmp_path)
        with trial.phase(phase):
            trial.stop(process, STOPPED_SECONDS)
        trial.goes_on(STOPPED_SECONDS + KILLED_SECONDS)
        trial.ends_like(expected)
        trial.leaves_nothing()
