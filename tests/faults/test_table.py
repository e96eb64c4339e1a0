"""Every process, killed or stopped for half a minute, in every phase of a job."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.control.jobs import undisturbed
from tests.faults.trial import SHORT_STEPS, STEPS, Phase, Process, Trial, trial_cluster

STOPPED_SECONDS = 30.0
KILLED_SECONDS = 40.0  # to go on in, on a busy machine
TABLE = [(process, phase) for process in Process for phase in Phase]
# In the normal suite, with fewer steps; all others are soak tests.
SHORT = [
    (Process.WORKER, Phase.FORMING),
    (Process.KEEPER, Phase.FLUSHING),
]


def cell(process: Process, phase: Phase) -> object:
    return pytest.param(process, phase, id=f"{process}-{phase}")


@pytest.fixture(scope="module")
def expected_soon(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the job comes to in fewer steps when nothing happens to it."""
    return undisturbed(tmp_path_factory.mktemp("undisturbed"), SHORT_STEPS)


def kill_in_phase(
    root: Path, expected: Path, process: Process, phase: Phase, steps: int = STEPS
) -> None:
    """Kill a process in a phase; the job ends as if nothing had happened."""
    with trial_cluster(root) as cluster:
        trial = Trial(cluster, root, steps=steps)
        with trial.phase(phase):
            trial.kill(process)
        trial.goes_on(KILLED_SECONDS)
        trial.ends_like(expected)
        trial.leaves_nothing()


@pytest.mark.parametrize(("process", "phase"), [cell(*each) for each in SHORT])
def test_a_process_that_is_killed_changes_nothing(
    tmp_path: Path, expected_soon: Path, process: Process, phase: Phase
) -> None:
    kill_in_phase(tmp_path, expected_soon, process, phase, SHORT_STEPS)


@pytest.mark.soak
@pytest.mark.parametrize(("process", "phase"), [cell(*each) for each in TABLE])
def test_whatever_is_killed_the_job_ends_as_if_nothing_happened(
    tmp_path: Path, expected: Path, process: Process, phase: Phase
) -> None:
    kill_in_phase(tmp_path, expected, process, phase)


@pytest.mark.soak
@pytest.mark.parametrize(("process", "phase"), [cell(*each) for each in TABLE])
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
