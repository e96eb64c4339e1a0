"""Steps as tasks of Ray: the command on a node, what became of it, and a real Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.pipelines.engines.ray_steps import RayStep, run_step
from tests.control.backends.test_ray import needs_namespace, needs_ray

ROOT = Path(__file__).parents[3]


def test_a_task_runs_the_step_s_command_and_gives_its_exit_code(tmp_path: Path) -> None:
    log = tmp_path / "log"
    argv = ["sh", "-c", 'pwd; echo "$WORD" >&2; exit 4']
    assert run_step(argv, {"WORD": "so"}, str(tmp_path), str(log)) == 4
    assert log.read_text() == f"{tmp_path}\nso\n"


class LostError(Exception):
    """As Ray's own of a node that died."""


def played(result: Any, ended: bool = True) -> Any:
    def get(task: object) -> Any:
        if isinstance(result, Exception):
            raise result
        return result

    return SimpleNamespace(
        wait=lambda tasks, timeout: (tasks if ended else [], []),
        get=get,
        cancel=lambda task, force: None,
        exceptions=SimpleNamespace(RayError=LostError),
    )


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (0, ""),
        (3, "exit code 3: no luck"),
        (-9, "signal SIGKILL: no luck"),
        (LostError("node died"), "its node or task was lost: node died"),
    ],
)
def test_what_became_of_a_task_is_told(tmp_path: Path, result: Any, said: str) -> None:
    log = tmp_path / "log"
    log.write_text("no luck\n")
    assert RayStep(played(result, ended=False), "task", log).poll() is None
    step = RayStep(played(result), "task", log)
    assert step.poll() == said
    step.stop()
    assert step.poll() == "it was stopped"


@pytest.mark.soak
@needs_ray
@needs_namespace
def test_a_real_ray_runs_steps_side_by_side_and_ends_what_takes_too_long(tmp_path: Path) -> None:
    inside = ("unshare", "--net", "sh", "-c", 'ip link set lo up; exec "$@"', "-")
    done = subprocess.run(
        [*inside, sys.executable, "-m", "tests.pipelines.engines.ray_steps_play"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=tmp_path,
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["first"][0] == "done" and found["bad"] == ["failed", "exit code 3: no luck"]
    assert found["slow"] == ["failed", "took more than 0.1 minutes"]
    assert (tmp_path / "runs/pipelines/p/outputs/one").read_text() == "one\n"
