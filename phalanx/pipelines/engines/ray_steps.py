"""Steps as tasks of a Ray cluster, in folders that its nodes and this machine share."""

from __future__ import annotations

import os
import signal
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

from phalanx.control.backends.ray.submit import connect
from phalanx.control.host.parent_death import follow
from phalanx.pipelines.run.attempts import Attempt, ProcessOrder, last_words


class RayStep:
    """One attempt of a step as a task."""

    def __init__(self, ray: Any, task: Any, log: Path) -> None:
        self._ray, self._task, self._log, self._stopped = ray, task, log, False

    def poll(self) -> str | None:
        """None while it waits or runs, "" after success, otherwise the error."""
        ended, _ = self._ray.wait([self._task], timeout=0)
        if not ended:
            return None
        try:
            code = self._ray.get(self._task)
        except self._ray.exceptions.RayError as error:
            return "it was stopped" if self._stopped else f"its node or task was lost: {error}"
        if self._stopped:
            return "it was stopped"
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"{how}{last_words(self._log)}" if code else ""

    def stop(self) -> None:
        """Kill the task's process and all processes that it started."""
        self._stopped = True
        self._ray.cancel(self._task, force=True)

    def leave(self) -> None:
        """End the attempt together with its driver."""
        if self.poll() is None:
            self.stop()


class RayExecutor:
    """Has a Ray cluster run each attempt of a step."""

    def __init__(self, address: str) -> None:
        self._ray = connect(address)

    def end_leftovers(self, work: Path) -> None:
        """Nothing to do: Ray ends the tasks of a lost driver."""

    def start(self, order: ProcessOrder) -> Attempt:
        """Start one."""
        task = self._ray.remote(num_cpus=1, num_gpus=order.gpus, max_retries=0)(run_step)
        command = order.command
        started = task.remote(command.argv, command.environment, str(Path.cwd()), str(order.log))
        return RayStep(self._ray, started, order.log)


def run_step(argv: list[str], environment: dict[str, str], folder: str, log: str) -> int:
    """A step's command on whichever node this is; its exit code."""
    with Path(log).open("ab") as output:
        process = subprocess.Popen(
            argv,
            cwd=folder,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=partial(follow, os.getpid(), signal.SIGKILL),
        )
        return process.wait()
