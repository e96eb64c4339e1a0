"""The example pipeline, from raw text to the registry: how long it takes, all cached and killed.

Killed at random moments, it must repeat no finished step and end with the hashes of a calm run.

python -m benchmarks.pipeline --kills 20
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
from msgspec import Struct

from phalanx.pipelines.run.manifest import PipelineManifest
from phalanx.pipelines.run.record import read_record
from phalanx.pipelines.run.workspace import RESULT_FILE, Workspace
from proof.report import report

ROOT = Path(__file__).parents[1]
FILE = "examples/pipeline.toml"
FOLDER = Path("runs/pipelines/python-text")


class KilledRun(Struct):
    """What became of a run that was killed again and again."""

    folder: Path
    kills: int = 0
    repeated: int = 0  # results that were made again


def pipeline(*words: str) -> list[str]:
    """A command about the example."""
    return [sys.executable, "-m", "phalanx", "pipeline", *words, FILE]


def prepare(folder: Path) -> Path:
    """A folder in which the example runs as it does in the repository."""
    folder.mkdir()
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


def run(folder: Path) -> float:
    """Run the example to its end; seconds."""
    began = time.monotonic()
    subprocess.run(pipeline("run"), cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - began


def contents(folder: Path) -> dict[str, str]:
    """Hashes of all outputs of the last run that has ended."""
    path = max((folder / FOLDER / "runs").glob("*/manifest.json"))
    manifest = msgspec.json.decode(path.read_bytes(), type=PipelineManifest)
    assert manifest.state == "done"
    return {
        f"{name}.{output}": each.content
        for name, task in manifest.tasks.items()
        for output, each in task.outputs.items()
    }


def run_killed(folder: Path, kills: int, draws: random.Random, longest: float) -> KilledRun:
    """Run the example, killed at random moments as often as asked, or until it has ended."""
    done: dict[str, float] = {}
    killed, command = KilledRun(folder), pipeline("run")
    first = Workspace(folder / FOLDER).run_folder(1)
    while True:
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
        left = killed.kills < kills
        try:
            code = process.wait(draws.uniform(0.1, longest) if left else None)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            killed.kills += 1
        else:
            assert code == 0
            return killed
        made = _made(folder)
        killed.repeated += sum(made.get(key) != when for key, when in done.items())
        done = made
        if (first / "manifest.json").exists():
            return killed  # it was killed after its last deed
        if read_record(first / "record.log"):
            command = pipeline("resume")


def _made(folder: Path) -> dict[str, float]:
    """When each result was made, by key."""
    found = (folder / FOLDER / "store").glob(f"*/{RESULT_FILE}")
    return {path.parent.name: path.stat().st_mtime for path in found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    draws = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        calm = prepare(Path(name) / "calm")
        seconds, cached = run(calm), run(calm)
        print(f"whole {seconds:.1f} s, all cached {cached:.2f} s", flush=True)
        expected, kills, repeated, different = contents(calm), 0, 0, 0
        while kills < options.kills:
            folder = prepare(Path(name) / f"killed-{kills}")
            killed = run_killed(folder, options.kills - kills, draws, seconds / 3)
            kills, repeated = kills + killed.kills, repeated + killed.repeated
            different += sum(expected[key] != value for key, value in contents(folder).items())
            print(f"{kills} kills, {repeated} repeated, {different} different", flush=True)
    figures = {"seconds": seconds, "cached_seconds": cached, "kills": kills}
    return report("pipeline", {**figures, "repeated": repeated, "different": different})


if __name__ == "__main__":
    sys.exit(main())
