"""A server, an agent, a keeper or a zygote that can open nothing for a while."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.faults.test_combinations import lost_steps
from tests.faults.trial import SHORT_STEPS, Process, Trial, trial_cluster

pytestmark = pytest.mark.soak
GOES_ON_SECONDS = 60.0  # on a busy machine


@contextmanager
def no_more_descriptors(pid: int) -> Iterator[None]:
    """A process can open nothing; what it has stays open."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(
    ("poor", "dies"),
    [
        (Process.SERVER, Process.WORKER),
        (Process.AGENT, Process.WORKER),
        (Process.KEEPER, None),
        (Process.ZYGOTE, Process.WORKER),
    ],
)
def test_a_process_that_can_open_nothing_for_a_while(
    tmp_path: Path, short: Path, poor: Process, dies: Process | None
) -> None:
    with trial_cluster(tmp_path) as cluster:
        trial = Trial(cluster, tmp_path, steps=SHORT_STEPS)
        trial.reach(5)
        before, pid = trial.step, trial.pid(poor)
        victim = None if dies is None else trial.pid(dies)
        with no_more_descriptors(pid):
            time.sleep(2.0)
            if victim is not None:
                os.kill(victim, 9)
            time.sleep(8.0)
        trial.goes_on(GOES_ON_SECONDS)
        lost_steps(trial, before)
        trial.ends_like(short)
        trial.leaves_nothing()
