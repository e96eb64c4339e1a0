"""Runs on this machine: real processes, real files, everything that people ask of a pipeline."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from phalanx.cluster.pipelines.events import TaskState
from phalanx.config import ConfigError
from phalanx.pipelines.run.manifest import PipelineManifest
from phalanx.pipelines.run.processes import MARK, LocalExecutor, end_leftovers
from phalanx.pipelines.run.session import PipelineSession, RunEnd
from phalanx.pipelines.run.workspace import WorkspaceError
from tests.receivers import HttpReceiver

JOIN = {
    "command": ["sh", "-c", 'cat "$@" > "$OUT"', "sh", "{inputs.text}"],
    "inputs": {"text": "text/*.txt"},
    "outputs": {"all": "all.txt"},
    "environment": {"OUT": "{outputs.all}"},
}
COUNT = {
    "command": ["sh", "-c", "wc -c < {inputs.all} > {outputs.size}; echo counted >> ran"],
    "inputs": {"all": "join.all"},
    "outputs": {"size": "size"},
}


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    for name in ("a", "b"):
        (tmp_path / "text" / f"{name}.txt").write_text(name)


def session(**steps: dict[str, Any]) -> PipelineSession:
    return PipelineSession({"name": "small", "steps": steps})


def run(pipeline: PipelineSession, **options: Any) -> RunEnd:
    return pipeline.run(LocalExecutor(), lambda progress: None, **options)


def resume(pipeline: PipelineSession) -> RunEnd:
    return pipeline.resume(LocalExecutor(), lambda progress: None)


def states(end: RunEnd) -> dict[str, str]:
    return {name: str(each.state) for name, each in end.machine.tasks.items()}


def lives(pid: int) -> bool:
    with suppress(OSError):
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    return False


def test_steps_make_files_once_and_the_manifest_leads_back_to_raw_files() -> None:
    end = run(session(join=JOIN, count=COUNT))
    assert end.state == "done" and end.manifest is not None
    outputs = Path("runs/pipelines/small/outputs")
    assert (outputs / "all.txt").read_text() == "ab" and (outputs / "size").read_text() == "2\n"
    manifest = msgspec.json.decode(end.manifest.read_bytes(), type=PipelineManifest)
    size = manifest.tasks["count"]
    assert size.inputs["all"][0].source == "join.all"
    assert size.inputs["all"][0].content == manifest.tasks["join"].outputs["all"].content
    raw = manifest.raw["text/*.txt"]
    assert manifest.tasks["join"].inputs["text"][0].content == raw.content
    assert [Path(each.path).name for each in raw.files] == ["a.txt", "b.txt"]
    again = run(session(join=JOIN, count=COUNT))
    assert states(again) == {"join": "cached", "count": "cached"}
    assert Path("ran").read_text() == "counted\n"


def test_a_plan_says_what_would_run_and_starts_nothing() -> None:
    planned = session(join=JOIN, count=COUNT).plan()
    assert planned.tasks["join"].state is TaskState.READY
    run(session(join=JOIN, count=COUNT))
    Path("text/c.txt").write_text("c")
    planned = session(join=JOIN, count=COUNT).plan()
    assert planned.tasks["join"].state is TaskState.READY
    assert planned.tasks["count"].state is TaskState.WAITING
    assert Path("ran").read_text() == "counted\n"


def test_the_same_content_made_anew_runs_nothing_after_it() -> None:
    run(session(join=JOIN, count=COUNT))
    other = {**JOIN, "command": ["sh", "-c", 'cat text/a.txt text/b.txt > "$OUT"']}
    assert states(run(session(join=other, count=COUNT))) == {"join": "done", "count": "cached"}


def test_what_fails_says_how_and_is_tried_again() -> None:
    flaky = {
        "command": ["sh", "-c", "echo x >> tries; echo no luck; test $(wc -l < tries) -ge 3"],
        "retries": 2,
        "backoff_seconds": 0,
    }
    end = run(session(flaky=flaky))
    assert end.state == "done" and end.machine.tasks["flaky"].attempts == 3
    end = run(session(bad={"command": ["sh", "-c", "echo why; exit 7"]}))
    assert end.machine.tasks["bad"].reason == "exit code 7: why"
    end = run(session(none={"command": ["./not-there"]}))
    assert "cannot be started: No such file" in end.machine.tasks["none"].reason


def test_a_task_may_have_a_name_that_no_file_can_have() -> None:
    values = ["text/a.txt", "text/b.txt", "text/../" * 40 + "text/a.txt"]
    say = {"command": ["cat", "{file}"], "for_each": {"file": values}}
    end = run(session(say=say))
    assert end.state == "done"
    assert len(list(Path("runs/pipelines/small/runs/0001/logs").iterdir())) == 3


def test_a_step_that_ends_well_without_its_output_has_failed_and_nothing_is_kept() -> None:
    half = {"command": ["sh", "-c", "echo half > {outputs.a}"], "outputs": {"a": "a", "b": "b"}}
    end = run(session(half=half))
    assert end.machine.tasks["half"].reason == "it succeeded, but did not write its output b"
    assert list(Path("runs/pipelines/small/store").iterdir()) == []


def test_a_step_is_stopped_at_its_time_limit() -> None:
    end = run(session(slow={"command": ["sleep", "1000"], "timeout_minutes": 0.001}))
    assert end.machine.tasks["slow"].reason == "took more than 0.001 minutes"


def test_raw_files_that_change_under_a_step_fail_it() -> None:
    step = {**JOIN, "command": ["sh", "-c", "echo more > text/a.txt; touch {outputs.all}"]}
    end = run(session(join=step))
    assert end.machine.tasks["join"].reason.startswith("text/*.txt changed while it ran")


def test_a_person_is_asked_and_the_run_goes_on_with_the_answer() -> None:
    steps = {
        "join": JOIN,
        "ok": {"kind": "approval", "question": "go on?", "after": ["join"]},
        "count": {**COUNT, "after": ["ok"]},
    }
    end = run(session(**steps))
    assert end.state == "asking" and end.manifest is None
    with pytest.raises(WorkspaceError, match=r"asks nothing called join \(it asks: ok\)"):
        session(**steps).answer("join", True)
    session(**steps).answer("ok", True, "the scores are good")
    end = resume(session(**steps))
    assert end.state == "done"
    assert end.machine.tasks["ok"].reason.endswith(": the scores are good")
    with pytest.raises(WorkspaceError, match="run 1 is done"):
        resume(session(**steps))
    assert states(run(session(**steps)))["ok"] == "cached"


def test_a_run_that_nobody_drives_is_cancelled() -> None:
    asks = {"kind": "approval", "question": "?"}
    run(session(ok=asks))
    assert session(ok=asks).cancel("another file") == "run 1 is cancelled"
    machine = session(ok=asks).last_run().machine
    assert machine.state == "cancelled"
    assert machine.tasks["ok"].reason.endswith(": another file")


def test_whoever_drives_a_run_is_told_to_end_it_with_all_that_its_steps_started() -> None:
    slow = {"command": ["sh", "-c", "sleep 1000 & echo $! > started; mv started child; wait"]}
    driven = session(slow=slow)

    def cancel_it(progress: Any) -> None:
        if progress.state is TaskState.RUNNING:
            while not Path("child").exists():
                time.sleep(0.01)
            assert driven.cancel() == "run 1 has been asked to stop"

    end = driven.run(LocalExecutor(), cancel_it)
    assert end.state == "cancelled" and set(states(end).values()) == {"cancelled"}
    while lives(int(Path("child").read_text())):
        time.sleep(0.01)


def test_changed_raw_files_are_not_mixed_into_a_run_that_goes_on() -> None:
    steps = {"join": JOIN, "ok": {"kind": "approval", "question": "?", "after": ["join"]}}
    run(session(**steps))
    Path("text/a.txt").write_text("changed")
    with pytest.raises(ConfigError, match="has changed since run 1 began"):
        resume(session(**steps))


def test_a_run_of_another_release_is_not_mixed_with_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = {"ok": {"kind": "approval", "question": "?"}}
    run(session(**steps))
    monkeypatch.setattr("phalanx.pipelines.run.session.__version__", "99")
    with pytest.raises(WorkspaceError, match="run 1 was begun by Phalanx"):
        resume(session(**steps))


def test_a_receiver_is_told_how_steps_ended() -> None:
    with HttpReceiver() as receiver:
        tell = {"kind": "notify", "url": receiver.url, "after": ["bad:fail"]}
        end = run(session(bad={"command": ["false"]}, tell=tell))
    assert states(end) == {"bad": "failed", "tell": "done"}
    assert json.loads(receiver.got[0])["tasks"]["bad"] == "failed"


def test_processes_of_an_attempt_that_was_lost_are_ended_before_the_next() -> None:
    work = Path("work").absolute()
    lost = subprocess.Popen(["sleep", "1000"], env={**os.environ, MARK: str(work)})
    assert end_leftovers(work) == 1
    assert lost.wait() == -signal.SIGKILL
    assert end_leftovers(work) == 0


def test_a_register_step_makes_a_version_with_scores_and_lineage() -> None:
    from phalanx.pipelines.registry.models import ModelRegistry

    measure = {
        "command": ["sh", "-c", """echo '{{"scores": {{"loss": 2.5}}}}' > {outputs.scores}"""],
        "inputs": {"all": "join.all"},
        "outputs": {"scores": "scores.json"},
        "scores": ["loss"],
    }
    inputs = {"checkpoint": "join.all", "scores": "eval.scores"}
    steps = {"join": JOIN, "eval": measure}
    steps["register"] = {"kind": "register", "model": "toy", "inputs": inputs}
    end = run(session(**steps))
    assert end.state == "done"
    model = ModelRegistry(Path("runs/models")).get("toy")
    assert (model.version, model.stage, model.scores) == (1, "candidate", {"loss": 2.5})
    assert model.content == end.machine.tasks["join"].result.outputs["all"].content
    assert Path(model.lineage.manifest) == end.manifest
    run(session(**steps))
    assert len(ModelRegistry(Path("runs/models")).versions("toy")) == 1
