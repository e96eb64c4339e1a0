"""Who plans, simulates or looks on needs none of the packages that train."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from phalanx import __version__

ROOT = Path(__file__).parent.parent.parent
HIDDEN = ("torch", "tokenizers", "safetensors")
SITE = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        first = name.partition(".")[0]
        if first in HIDDEN:
            raise ModuleNotFoundError(f"No module named {first!r}", name=first)

sys.meta_path.insert(0, Hidden())
"""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command where nothing that trains can be imported."""
    (folder / "sitecustomize.py").write_text(f"HIDDEN = {HIDDEN!r}\n{SITE}")
    environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "phalanx", *words]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_a_plan_is_made(tmp_path: Path) -> None:
    done = run(tmp_path, "plan", "--model", "llama3-8b", "--cluster", "h100-16k", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)


def test_a_fleet_is_simulated(tmp_path: Path) -> None:
    words = ("simulate", "llama3-54d", "--gpus", "512", "--days", "1", "--json")
    done = run(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)


def test_what_trains_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('[model]\npreset = "tiny"\n[train]\ndevice = "cpu"\n')
    done = run(tmp_path, "train", "job.toml")
    assert done.returncode == 1
    assert "pip install 'phalanx[train]'" in done.stderr and "Traceback" not in done.stderr


def test_versions_of_what_it_runs_on_are_told(tmp_path: Path) -> None:
    told = json.loads(run(tmp_path, "--version", "--json").stdout)
    assert told["phalanx"] == __version__ and told["torch"]  # its version needs no import


@pytest.mark.soak
def test_the_wheel_alone_plans_and_simulates(tmp_path: Path) -> None:
    """In an environment of its own, from the package registry."""
    source = tmp_path / "source"  # where nothing is left over from an earlier build
    shutil.copytree(ROOT / "phalanx", source / "phalanx")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(tmp_path)]
    subprocess.run([*build, str(source)], check=True)
    (wheel,) = tmp_path.glob("phalanx-*.whl")
    assert wheel.stat().st_size < 5_000_000
    names = zipfile.ZipFile(wheel).namelist()
    for packed in ("observe/page/index.html", "cli/train/demo.toml", "py.typed"):
        assert f"phalanx/{packed}" in names
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "bare")], check=True)
    binaries = tmp_path / "bare" / "bin"
    subprocess.run([binaries / "pip", "install", "--quiet", str(wheel)], check=True)
    for words in (
        ("plan", "--model", "llama3-405b", "--cluster", "h100-16k", "--tokens", "15T"),
        ("simulate", "llama3-54d", "--days", "2"),
    ):
        done = subprocess.run(
            [binaries / "phalanx", *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    assert not list(tmp_path.glob("bare/lib/*/site-packages/torch"))
