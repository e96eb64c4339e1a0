"""`phalanx new model` writes a model that is proved as it is, and `phalanx parity` proves it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.commands import run_phalanx


def test_the_skeleton_is_proved_as_it_is(tmp_path: Path) -> None:
    done = run_phalanx("new", "model", "my_model", "--into", "mine", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "mine"
    files = {path.name for path in folder.iterdir()}
    assert files == {"my_model.py", "my_model.toml", "test_my_model.py"}
    meshes = ("--mesh", "tp2", "--mesh", "cp2-ring", "--mesh", "pp2-1f1b")
    options = ("--ranks", "2", "--steps", "1", "--json", *meshes)
    proved = run_phalanx("parity", "my_model.toml", *options, folder=folder)
    assert proved.returncode == 0, proved.stdout + proved.stderr
    assert [one["same"] for one in json.loads(proved.stdout)] == [True] * 3
    again = run_phalanx("new", "model", "my_model", "--into", "mine", folder=tmp_path)
    assert again.returncode == 2 and "exists already" in again.stderr


def test_a_name_that_is_no_module_is_refused(tmp_path: Path) -> None:
    done = run_phalanx("new", "model", "My-Model", folder=tmp_path)
    assert done.returncode == 2 and "no name of a module" in done.stderr
    assert not list(tmp_path.iterdir())
