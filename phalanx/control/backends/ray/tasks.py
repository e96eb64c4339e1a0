"""Work units on Ray: tasks that run the unit's command, spread over the cluster."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from phalanx.control.backends.ray.submit import connect

log = logging.getLogger("phalanx.ray")
TASKS_A_CPU = 2  # so that long and short shares even out
RETRIES = 3  # of a task whose node died
SAID_CHARACTERS = 2000  # of a command that failed


class RayTasks:
    """Has units done by Ray tasks; work and inputs lie on a file system that nodes share."""

    def __init__(self, address: str, tasks: int = 0) -> None:
        self._address, self._tasks = address, tasks

    def run(self, phase: Path, units: int, done: Callable[[], None]) -> None:
        """Start the tasks and wait for all; those of a lost node are done again elsewhere."""
        ray = connect(self._address)
        try:
            cpus = int(ray.cluster_resources().get("CPU", 1))
            tasks = min(units, self._tasks or TASKS_A_CPU * cpus)
            remote = ray.remote(num_cpus=1, max_retries=RETRIES)(run_share)
            waiting = [
                remote.remote(str(phase.absolute()), number, tasks, str(Path.cwd()))
                for number in range(tasks)
            ]
            while waiting:
                ended, waiting = ray.wait(waiting, num_returns=1)
                try:
                    said = ray.get(ended[0])
                except ray.exceptions.RayError as error:  # its node died again and again
                    said = str(error)
                if said:
                    log.warning("%s", said)
        finally:
            ray.shutdown()


def run_share(phase: str, task: int, tasks: int, folder: str) -> str:
    """One task's share of a phase, by its command; what it said where it failed.

    A mistake of the user's is no failure: it is left in the work folder.
    """
    command = [sys.executable, "-m", "phalanx", "data", "prepare", "--unit"]
    ended = subprocess.run(
        [*command, f"{phase}:{task}/{tasks}"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    said = (ended.stderr or ended.stdout)[-SAID_CHARACTERS:]
    if not ended.returncode:
        return ""
    return f"share {task} of {tasks} of {phase} ended with {ended.returncode}: {said}"
