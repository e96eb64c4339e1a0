"""Somebody sets the clock of a node, or of the server, by an hour while a job trains."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from phalanx.control.backends.local import processes_of
from tests.faults.clocks import SetClocks
from tests.faults.test_combinations import lost_steps
from tests.faults.trial import SHORT_STEPS, Process, Trial, trial_cluster

HOUR = 3600  # seconds
GOES_ON_SECONDS = 60.0  # on a busy machine


@pytest.fixture
def clocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SetClocks:
    return SetClocks(tmp_path, monkeypatch)


@contextmanager
def kept_wrong(clocks: SetClocks, pids: Callable[[], list[int]], seconds: int) -> Iterator[None]:
    """Also of processes that start meanwhile."""
    over = threading.Event()

    def keep() -> None:
        while not over.wait(0.05):
            clocks.set(pids(), seconds)

    clocks.set(pids(), seconds)
    thread = threading.Thread(target=keep)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_clock_can_be_set(clocks: SetClocks) -> None:
    code = "import time; print(time.time(), flush=True); input(); print(time.time(), flush=True)"
    command = [sys.executable, "-c", code]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:  # type: ignore[call-overload]
        first = float(process.stdout.readline())
        clocks.set([process.pid], -HOUR)
        later = float(process.communicate("\n")[0])
        assert abs(first - HOUR - later) < HOUR / 2


STORAGE = "[storage]\nflushes = 1\nbytes_per_second = 50_000_000\n"


@pytest.mark.soak
@pytest.mark.parametrize("seconds", [-HOUR, HOUR])
def test_a_node_whose_clock_jumps_and_whose_agent_is_started_again(
    tmp_path: Path, short: Path, clocks: SetClocks, seconds: int
) -> None:
    """Leave to write, which has an end, is asked for and used meanwhile."""
    with trial_cluster(tmp_path, policy=STORAGE) as cluster:
        trial = Trial(cluster, tmp_path, steps=SHORT_STEPS)
        trial.reach(5)
        before, node = trial.step, trial.node(0)

        def its_own() -> list[int]:
            return [*processes_of(node), *([node.agent.pid] if node.agent is not None else [])]

        with kept_wrong(clocks, its_own, seconds):
            trial.wait(lambda: trial.step >= before + 3, "steps meanwhile", 30)
            trial.kill(Process.AGENT, slot=0)
            trial.goes_on(GOES_ON_SECONDS)
            lost_steps(trial, before)
            trial.wait(lambda: cluster.job(trial.job)["durable"] >= 12, "a checkpoint", 60)
        trial.ends_like(short)
        trial.leaves_nothing()


@pytest.mark.soak
@pytest.mark.parametrize("seconds", [-HOUR, HOUR])
def test_a_server_whose_clock_jumps_while_an_agent_is_started_again(
    tmp_path: Path, short: Path, clocks: SetClocks, seconds: int
) -> None:
    """What its log says of time goes on, whatever its clock says."""
    with trial_cluster(tmp_path) as cluster:
        trial = Trial(cluster, tmp_path, steps=SHORT_STEPS)
        trial.reach(5)
        before = trial.step
        server = [trial.pid(Process.SERVER)]
        with kept_wrong(clocks, lambda: server, seconds):
            trial.wait(lambda: trial.step >= before + 3, "steps meanwhile", 30)
            trial.kill(Process.AGENT)
            trial.goes_on(GOES_ON_SECONDS)
            assert not lost_steps(trial, before)
            assert not cluster.events("NodeSilent", trial.job)
        os.kill(server[0], signal.SIGKILL)  # and the next one's is right again
        cluster.kill_server()
        cluster.start_server()
        time.sleep(2.0)
        trial.goes_on(GOES_ON_SECONDS)
        trial.ends_like(short)
        trial.leaves_nothing()
