"""The example from raw text to the registry, killed at random moments: the same hashes."""

from __future__ import annotations

import itertools
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from phalanx.pipelines.registry.models import ModelRegistry
from phalanx.pipelines.run.manifest import PipelineManifest
from phalanx.pipelines.run.record import read_record
from phalanx.pipelines.run.workspace import RESULT_FILE

ROOT = Path(__file__).parents[2]
FOLDER = Path("runs/pipelines/python-text")
KILLS = 20


def phalanx(*words: str) -> list[str]:
    return [sys.executable, "-m", "phalanx", *words]


RUN = phalanx("pipeline", "run", "examples/pipeline.toml")


def prepared(folder: Path) -> Path:
    """A folder in which the example runs as it does in the repository."""
    folder.mkdir()
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


def last_manifest(folder: Path) -> PipelineManifest:
    path = max((folder / FOLDER / "runs").glob("*/manifest.json"))
    return msgspec.json.decode(path.read_bytes(), type=PipelineManifest)


def contents(manifest: PipelineManifest) -> dict[str, str]:
    return {
        f"{name}.{output}": each.content
        for name, task in manifest.tasks.items()
        for output, each in task.outputs.items()
    }


def published(folder: Path) -> set[str]:
    return {path.name for path in (folder / FOLDER / "store").glob("*") if path.is_dir()}


def killed_run(folder: Path, kills: int, draws: random.Random, longest: float) -> int:
    """Run the example in a folder, killed at most so often; how often it was."""
    done: dict[str, float] = {}
    command, count = RUN, 0
    while True:
        process = subprocess.Popen(command, cwd=folder)
        try:
            code = process.wait(draws.uniform(0.1, longest) if count < kills else None)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            count += 1
        else:
            assert code == 0
            return count
        results = {key: _made(folder, key) for key in published(folder)}
        assert results.items() >= done.items(), "a finished step was run again"
        done = results
        if (folder / FOLDER / "runs" / "0001" / "manifest.json").exists():
            return count  # killed after its last deed
        if read_record(folder / FOLDER / "runs" / "0001" / "record.log"):
            command = phalanx("pipeline", "resume", "examples/pipeline.toml")


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_killed_at_random_moments_the_example_ends_with_the_same_hashes(tmp_path: Path) -> None:
    calm = prepared(tmp_path / "calm")
    began = time.monotonic()
    subprocess.run(RUN, cwd=calm, check=True)
    seconds = time.monotonic() - began
    expected, draws, kills = contents(last_manifest(calm)), random.Random(1), 0
    for number in itertools.count():
        killed = prepared(tmp_path / f"killed-{number}")
        kills += killed_run(killed, KILLS - kills, draws, seconds / 3)
        assert contents(last_manifest(killed)) == expected
        models = ModelRegistry(killed / "runs" / "models")
        assert [each.version for each in models.versions("python-text")] == [1]
        if kills >= KILLS:
            break
    again = subprocess.run(RUN, cwd=killed, check=True, capture_output=True, text=True)
    assert "running" not in again.stdout


def _made(folder: Path, key: str) -> float:
    return (folder / FOLDER / "store" / key / RESULT_FILE).stat().st_mtime
