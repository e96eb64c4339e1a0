"""A run that is killed anywhere goes on, repeats no finished step, ends with the same hashes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from phalanx.pipelines.run.processes import LocalExecutor
from phalanx.pipelines.run.record import PipelineRecord
from phalanx.pipelines.run.session import PipelineSession
from phalanx.pipelines.run.workspace import RESULT_FILE, StoredResult, Workspace

STEPS: dict[str, Any] = {
    "raw": {
        "command": ["sh", "-c", "echo raw >> ran; cat {inputs.text} > {outputs.out}"],
        "inputs": {"text": "text.txt"},
        "outputs": {"out": "raw"},
    },
    "many": {
        "command": ["sh", "-c", "echo 'many[n={n}]' >> ran; cat {inputs.raw} > {outputs.out}"],
        "for_each": {"n": [1, 2]},
        "inputs": {"raw": "raw.out"},
        "outputs": {"out": "many/{n}"},
    },
    "last": {
        "command": ["sh", "-c", "echo last >> ran; cat $0 $1 > {outputs.out}", "{inputs.many}"],
        "inputs": {"many": "many.out"},
        "outputs": {"out": "last"},
    },
}
WATCHED = [
    (PipelineRecord, "append"),
    (Workspace, "publish"),
    (Workspace, "prepare"),
    (Workspace, "link"),
    (LocalExecutor, "start"),
    (os, "rename"),
    (os, "replace"),
]
MOST_POINTS = 200


def session() -> PipelineSession:
    return PipelineSession({"name": "killed", "parallel": 2, "steps": STEPS})


def drive() -> None:
    """Begin the run, or go on with it."""
    pipeline = session()
    begin = pipeline.workspace.last_run() == 0
    (pipeline.run if begin else pipeline.resume)(LocalExecutor(), lambda progress: None)


def killed_at(point: int) -> bool:
    """Drive in a process that is killed before its n-th important call; whether it was."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == signal.SIGKILL
    calls = 0

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == point:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **named)

        return counted

    for owner, name in WATCHED:
        setattr(owner, name, watched(getattr(owner, name)))
    drive()
    os._exit(0)


def finished() -> set[str]:
    """Tasks whose results are in the store."""
    return {
        msgspec.json.decode(path.read_bytes(), type=StoredResult).task
        for path in Path("runs/pipelines/killed/store").glob(f"*/{RESULT_FILE}")
    }


def ran() -> list[str]:
    return Path("ran").read_text().split() if Path("ran").exists() else []


def contents() -> dict[str, str]:
    machine = session().last_run().machine
    assert machine.state == "done"
    assert Path("runs/pipelines/killed/runs/0001/manifest.json").exists()
    return {
        f"{name}.{output}": each.content
        for name, progress in machine.tasks.items()
        for output, each in progress.result.outputs.items()
    }


def in_a_new_folder(parent: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (parent / name).mkdir()
    monkeypatch.chdir(parent / name)
    Path("text.txt").write_text("some text\n")


def test_killed_before_any_call_it_goes_on_and_ends_with_the_same_hashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_a_new_folder(tmp_path, "calm", monkeypatch)
    drive()
    calm = contents()
    assert sorted(ran()) == ["last", "many[n=1]", "many[n=2]", "raw"]
    for point in range(1, MOST_POINTS, 3):
        in_a_new_folder(tmp_path, f"killed-{point}", monkeypatch)
        if not killed_at(point):
            assert point > 20
            break
        done, before = finished(), ran()
        drive()
        assert contents() == calm
        assert done.isdisjoint(ran()[len(before) :]), "a finished step was run again"


def test_killed_again_and_again_it_still_comes_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_a_new_folder(tmp_path, "calm", monkeypatch)
    drive()
    calm = contents()
    in_a_new_folder(tmp_path, "killed", monkeypatch)
    done, before = finished(), ran()
    for point in range(2, MOST_POINTS, 2):
        if not killed_at(point):
            break
        assert done.isdisjoint(ran()[len(before) :]), "a finished step was run again"
        done, before = finished(), ran()
    assert contents() == calm and point > 6
