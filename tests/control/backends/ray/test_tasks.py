"""Work units on Ray: the command of a share, and the same corpus as on one machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.control.backends.ray.submit import RayError
from phalanx.control.backends.ray.tasks import RayTasks, run_share
from phalanx.data import read_manifest
from phalanx.data.prepare.engine import LocalEngine
from phalanx.data.prepare.run import prepare
from phalanx.data.prepare.work import IdentifyFiles, UnitPhase, WorkFolder
from tests.control.backends.test_ray import needs_namespace, needs_ray
from tests.data.prepare.raw import recipe, recipe_file, write_raw

ROOT = Path(__file__).parents[4]


def test_a_share_is_done_by_its_command_and_a_failure_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "a.txt").write_text("text")
    unit = IdentifyFiles("key", ("a.txt",))  # found from the folder that is given
    work = WorkFolder(tmp_path / "work")
    phase = work.write_phase(UnitPhase("inputs", recipe(tmp_path), "", (unit,)))
    assert run_share(str(phase), 0, 1, str(tmp_path)) == ""
    assert work.done(unit)
    said = run_share(str(tmp_path / "none.json"), 0, 1, str(tmp_path))
    assert "ended with 2" in said and "describes no units" in said


@needs_ray
def test_without_a_cluster_it_says_how_to_start_one(tmp_path: Path) -> None:
    with pytest.raises(RayError, match="ray start --head"):
        RayTasks("127.0.0.1:1").run(tmp_path / "filter.json", 1, lambda: None)


@pytest.mark.soak
@needs_ray
@needs_namespace
def test_four_nodes_one_of_which_dies_make_the_corpus_that_one_machine_makes(
    tmp_path: Path,
) -> None:
    write_raw(tmp_path / "raw")
    inside = ("unshare", "--net", "sh", "-c", 'ip link set lo up; exec "$@"', "-")
    module = (sys.executable, "-m", "tests.control.backends.ray_prepare_play")
    done = subprocess.run(
        [*inside, *module, str(recipe_file(tmp_path))],
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
        cwd=ROOT,
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["code"] == 0, found["said"]
    alone = recipe(tmp_path, overrides=[f"out={tmp_path / 'alone'}"])
    prepare(alone, tmp_path, LocalEngine(1))
    assert read_manifest(tmp_path / "out") == read_manifest(tmp_path / "alone")
