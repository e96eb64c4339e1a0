"""Every process, killed or stopped for half a minute, in every phase of a job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.testing.local_cluster import TrialCluster
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


@pytest.fixture(scope="module")
def one_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrialCluster]:
    """For all cells of the normal suite, one job after the other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHALANX_CHAOS", "1")
        with trial_cluster(tmp_path_factory.mktemp("table")) as cluster:
            yield cluster


def kill_in_phase(
    cluster: TrialCluster, expected: Path, process: Process, phase: Phase, steps: int = STEPS
) -> None:
    """Kill a process in a phase; the job ends as if nothing had happened."""
    trial = Trial(cluster, cluster.root, steps=steps)
    with trial.phase(phase):
        trial.kill(process)
    trial.goes_on(KILLED_SECONDS)
    trial.ends_like(expected)
    trial.leaves_nothing()


@pytest.mark.parametrize(("process", "phase"), [cell(*each) for each in SHORT])
def test_a_process_that_is_killed_changes_nothing(
    one_cluster: TrialCluster, expected_soon: Path, process: Process, phase: Phase
) -> None:
    kill_in_phase(one_cluster, expected_soon, process, phase, SHORT_STEPS)


@pytest.mark.soak
@pytest.mark.parametrize(("process", "phase"), [cell(*each) for each in TABLE])
def test_whatever_is_killed_the_job_ends_as_if_nothing_happened(
    tmp_path: Path, expected: Path, process: Process, phase: Phase
) -> None:
    with trial_cluster(tmp_path) as cluster:
        kill_in_phase(cluster, expected, process, phase)


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
