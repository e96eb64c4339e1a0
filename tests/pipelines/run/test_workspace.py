"""Results of steps: whole or not there, and no longer there once somebody changed them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from phalanx.cluster.pipelines.description import pipeline_from_table
from phalanx.cluster.pipelines.graph import Task, TaskGraph
from phalanx.pipelines.run.workspace import UnfinishedOutput, Workspace, WorkspaceError

STEP = {
    "command": ["true"],
    "outputs": {"text": "deep/text.txt", "scores": "scores.json"},
    "scores": ["loss"],
}


@pytest.fixture
def task() -> Task:
    return TaskGraph(pipeline_from_table({"name": "x", "steps": {"a": STEP}})).in_order[0]


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    made = Workspace(tmp_path / "pipeline")
    made.create()
    return made


def work(
    workspace: Workspace, text: str = "text", scores: str = '{"scores": {"loss": 1.5}}'
) -> None:
    folder = workspace.prepare("key", keep=False)
    (folder / "deep").mkdir()
    (folder / "deep" / "text.txt").write_text(text)
    (folder / "scores.json").write_text(scores)
    (folder / "scratch").mkdir()
    (folder / "deep" / "scratch.bin").write_text("left over")


def test_a_result_is_found_after_it_was_published_and_holds_its_outputs_alone(
    workspace: Workspace, task: Task
) -> None:
    work(workspace)
    assert workspace.look_up("key") is None
    result = workspace.publish("key", task.name, task.step)
    assert workspace.look_up("key") == result
    assert result.scores == {"loss": 1.5}
    assert (workspace.folder / result.outputs["text"].path).read_text() == "text"
    names = {path.name for path in (workspace.store / "key").rglob("*")}
    assert names == {"deep", "text.txt", "scores.json", ".result.json"}
    assert not (workspace.work / "key").exists()


@pytest.mark.parametrize("change", ["text", "gone", "result"])
def test_a_result_that_was_changed_is_none(workspace: Workspace, task: Task, change: str) -> None:
    work(workspace)
    path = workspace.folder / workspace.publish("key", task.name, task.step).outputs["text"].path
    if change == "text":
        path.write_text("other")
    elif change == "gone":
        path.unlink()
    else:
        (workspace.store / "key" / ".result.json").write_text("{")
    assert workspace.look_up("key") is None
    work(workspace, "anew")
    assert workspace.publish("key", task.name, task.step) == workspace.look_up("key")


def test_a_result_that_was_only_touched_is_read_again_and_stands(
    workspace: Workspace, task: Task
) -> None:
    work(workspace)
    result = workspace.publish("key", task.name, task.step)
    os.utime(workspace.folder / result.outputs["text"].path, ns=(1, 1))
    assert workspace.look_up("key") == result


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        ('{"scores": {"other": 1}}', "have no loss"),
        ('{"scores": {"loss": NaN}}', "cannot be read"),
        ('{"scores": {"loss": null}}', "cannot be read"),
        ("", "cannot be read"),
        (None, "did not write its output scores"),
    ],
)
def test_what_lacks_an_output_or_a_score_is_not_published(
    workspace: Workspace, task: Task, scores: str | None, said: str
) -> None:
    work(workspace, scores=scores or "")
    if scores is None:
        (workspace.work / "key" / "scores.json").unlink()
    with pytest.raises(UnfinishedOutput, match=said):
        workspace.publish("key", task.name, task.step)
    assert workspace.look_up("key") is None


def test_links_lead_to_the_newest_result(workspace: Workspace, task: Task) -> None:
    work(workspace)
    workspace.link(task.step, workspace.publish("key", task.name, task.step))
    assert (workspace.links / "deep" / "text.txt").read_text() == "text"


def test_a_folder_is_driven_by_one_at_a_time(workspace: Workspace) -> None:
    other = Workspace(workspace.folder)
    said = f"is being run by process {os.getpid()}"
    with workspace.locked(), pytest.raises(WorkspaceError, match=said), other.locked():
        pass
    with other.locked():
        pass


def test_work_is_kept_only_where_an_attempt_can_go_on_with_it(workspace: Workspace) -> None:
    (workspace.prepare("key", keep=False) / "half").write_text("x")
    assert (workspace.prepare("key", keep=True) / "half").exists()
    assert not (workspace.prepare("key", keep=False) / "half").exists()
