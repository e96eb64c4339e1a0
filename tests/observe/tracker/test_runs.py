"""The tracker: what is known of runs, and what differs between two of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from phalanx.cli import main
from phalanx.config import Job
from phalanx.config.schema import Train
from phalanx.data import ShardWriter
from phalanx.observe.tracker.runs import Run, differences, find_folders, load_folder, removed
from phalanx.train.process_identity import own_process
from phalanx.train.report import run_folder
from phalanx.train.report.run_folder import RunFolder
from tests.commands import run_forked, run_phalanx
from tests.control.jobs import write_job
from tests.observe.records import step_record


def git(folder: Path, *arguments: str) -> None:
    environment = os.environ | {
        "GIT_AUTHOR_NAME": "t",
        "GIT_AUTHOR_EMAIL": "t@example.org",
        "GIT_COMMITTER_NAME": "t",
        "GIT_COMMITTER_EMAIL": "t@example.org",
    }
    subprocess.run(
        ["git", *arguments], cwd=folder, env=environment, check=True, capture_output=True
    )


def phalanx(folder: Path, *arguments: str, site: Path | None = None, **environment: str) -> str:
    """What a command prints; ``site``: packages that it finds before all others."""

    def call() -> None:
        if site is not None:
            sys.path.insert(0, str(site))
        main()

    words, given = ["phalanx", *arguments], os.environ | environment
    done = run_forked(call, words, given, folder, seconds=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Two real runs that differ in one setting, one package and one commit."""
    root = tmp_path_factory.mktemp("tracked")
    git(root, "init", "-q")
    (root / ".gitignore").write_text("runs\nsite\n")
    job = write_job(root, "tracked", 3)
    text = job.read_text().replace("data = 2", "data = 1").replace("pipeline = 2", "pipeline = 1")
    job.write_text(text)
    git(root, "add", ".")
    git(root, "commit", "-qm", "one")
    package = root / "site" / "shelf-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: shelf\nVersion: 1.0\n")
    phalanx(root, "train", str(job), site=root / "site")
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: shelf\nVersion: 1.1\n")
    (root / "more.py").write_text("")
    git(root, "add", ".")
    git(root, "commit", "-qm", "two")
    phalanx(root, "train", str(job), "--set", "optimizer.learning_rate=0.002", site=root / "site")
    a, b = find_folders(root / "runs")
    return root, a, b


def test_validations_and_scores_are_in_the_summary_the_list_and_the_export(tmp_path: Path) -> None:
    job = write_job(tmp_path, "tried", 4)
    text = job.read_text().replace("data = 2", "data = 1").replace("pipeline = 2", "pipeline = 1")
    text = text.replace("every = 0", "every = 2").replace("[train]", "[train]\nvalidate_every = 2")
    text += '\n[evaluate]\nevery = 2\nperplexity = { near = "near" }\n'
    job.write_text(text.replace("sequence = 32", "sequence = 32\nvalidation_fraction = 0.1"))
    with ShardWriter(tmp_path / "near", 64, 0) as writer:
        writer.write([1, 2, 3])
        writer.end_document()
        writer.finish()
    phalanx(tmp_path, "train", str(job))
    (folder,) = find_folders(tmp_path / "runs")
    summary = load_folder(folder).summary
    assert (summary["step"], summary["validation_step"]) == (4, 4)
    listed = phalanx(tmp_path, "runs", "ls", "--runs", "runs", COLUMNS="200")
    assert f"{summary['validation_loss']:.4g}" in listed
    assert "validation_loss: " in phalanx(tmp_path, "runs", "show", str(folder))
    phalanx(tmp_path, "runs", "export", str(folder), "--out", "all.json")
    whole = json.loads((tmp_path / "all.json").read_text())
    assert [each["step"] for each in whole["validations"]] == [2, 4]
    assert [each["step"] for each in whole["evaluations"]] == [2, 4]
    assert whole["evaluations"][1]["scores"] == summary["scores"]
    assert (summary["evaluation_step"], summary["scores"]["near.tokens"]) == (4, 3)
    assert "score near.perplexity: " in phalanx(tmp_path, "runs", "show", str(folder))
    phalanx(tmp_path, "report", str(folder), "--out", "report")
    assert "loss on held-out samples after step 4" in (tmp_path / "report.md").read_text()


def test_two_runs_differ_in_exactly_what_was_changed(two_runs: tuple[Path, Path, Path]) -> None:
    _, a, b = two_runs
    found = differences(load_folder(a), load_folder(b))
    assert [(each.section, each.key) for each in found] == [
        ("settings", "optimizer.learning_rate"),
        ("packages", "shelf"),
        ("project", "commit"),
    ]


def test_a_run_has_its_configuration_origin_and_end(two_runs: tuple[Path, Path, Path]) -> None:
    _, a, _ = two_runs
    run = load_folder(a)
    assert run.state == "done"
    assert run.config["train"]["steps"] == 3
    assert run.summary["step"] == 3
    assert run.provenance["seeds"]
    assert run.provenance["data"] == {"source": "synthetic"}
    assert run.exit["reason"] == "done"


def test_notes_and_tags_stay_with_a_folder(two_runs: tuple[Path, Path, Path]) -> None:
    root, a, b = two_runs
    phalanx(root, "runs", "note", str(a), "[bold]looks odd[/bold] <script>")
    phalanx(root, "runs", "tag", str(a), "baseline", "old")
    phalanx(root, "runs", "tag", str(a), "--", "-old")
    run = load_folder(a)
    assert [note.text for note in run.notes] == ["[bold]looks odd[/bold] <script>"]
    assert run.tags == ["baseline"]
    shown = phalanx(root, "runs", "show", str(a))
    assert "[bold]looks odd[/bold] <script>" in shown
    listed = json.loads(phalanx(root, "runs", "ls", "--runs", "runs", "--json"))
    assert [each["tags"] for each in listed] == [["baseline"], []]
    printed = json.loads(phalanx(root, "runs", "diff", str(a), str(b), "--json"))
    assert len(printed) == 3


def test_an_export_holds_every_step(two_runs: tuple[Path, Path, Path]) -> None:
    root, a, _ = two_runs
    with (a / "metrics" / "steps.jsonl").open("ab") as file:
        file.write(b'{"kind":"step","cut in the mid')
    phalanx(root, "runs", "export", str(a), "--out", "whole.json")
    whole = json.loads((root / "whole.json").read_text())
    assert [step["step"] for step in whole["steps"]] == [1, 2, 3]
    assert load_folder(a).summary["step"] == 3


@pytest.mark.parametrize("name", ["config/job.json", "provenance/provenance.json", "tracker.json"])
def test_a_damaged_file_of_a_run_is_no_crash(tmp_path: Path, name: str) -> None:
    for each in ("config/job.json", "provenance/provenance.json", "tracker.json"):
        (tmp_path / each).parent.mkdir(exist_ok=True)
        (tmp_path / each).write_text('{"name": "x"}' if each.startswith("config") else "{}")
    (tmp_path / name).write_bytes(b'{"half')
    if name.startswith("config"):
        with pytest.raises(ValueError, match="no run"):
            load_folder(tmp_path)
    else:
        assert load_folder(tmp_path).name == "x"


def test_equal_runs_differ_in_nothing() -> None:
    one = Run(id="1", config={"a": {"b": 1}}, provenance={"host": "x", "started": "1"})
    other = Run(id="2", config={"a": {"b": 1}}, provenance={"host": "y", "started": "2"})
    assert differences(one, other) == []


def test_a_setting_is_the_same_in_memory_and_from_a_file() -> None:
    table = {"data": {"stages": ()}, "train": {"batch_ramp": ("a", "b"), "steps": 3}}
    one = Run(id="1", config=table)
    other = msgspec.json.decode(msgspec.json.encode(one), type=Run)
    assert differences(one, other) == []


def test_beside_a_run_that_has_not_begun_only_that_is_told() -> None:
    one = Run(id="1", config={"a": 1}, provenance={"packages": {"x": "1", "y": "2"}})
    other = Run(id="2", config={"a": 2})
    found = differences(one, other)
    assert [(each.section, each.key) for each in found] == [
        ("origin", "code, packages, data"),
        ("settings", "a"),
    ]


def test_a_checkpoint_that_was_removed_is_told_apart_from_one_out_of_sight(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-2").mkdir(parents=True)
    assert removed(str(tmp_path / "checkpoints" / "step-1"))
    assert not removed(str(tmp_path / "checkpoints" / "step-2"))
    assert not removed(str(tmp_path / "elsewhere" / "step-1"))
    assert not removed("s3://bucket/run/step-1")


def a_run(folder: Path, exit_info: dict[str, object] | None = None, step: int = 19) -> Path:
    """The folder of a run of 60 steps that this process makes."""
    made = run_folder.create(Job(name="states", runs=str(folder), train=Train(steps=60)))
    made.steps.write_bytes(msgspec.json.encode(step_record(step)) + b"\n")
    if exit_info is not None:
        made.exit_info.write_bytes(msgspec.json.encode(exit_info))
    return made.path


@pytest.mark.parametrize(
    ("exit_info", "state"),
    [
        ({"code": 0, "reason": "done"}, "done"),
        ({"code": 0, "reason": "SIGTERM"}, "stopped"),
        ({"code": 0, "reason": "SIGHUP"}, "stopped"),
        ({"code": 130, "reason": "SIGINT"}, "interrupted"),
        ({"code": 13, "reason": "non_finite"}, "failed"),
        (None, "running"),
    ],
)
def test_a_run_is_done_only_if_it_made_its_steps(
    tmp_path: Path, exit_info: dict[str, object] | None, state: str
) -> None:
    assert load_folder(a_run(tmp_path, exit_info)).state == state


def test_a_run_without_a_report_is_lost_when_its_process_is_gone(tmp_path: Path) -> None:
    path = a_run(tmp_path)
    process = own_process()
    gone = subprocess.Popen(["true"])
    gone.wait()
    ended = [
        msgspec.structs.replace(process, pid=gone.pid, started_ticks=1),
        msgspec.structs.replace(process, started_ticks=process.started_ticks + 1),  # used again
    ]
    if process.machine:
        ended.append(msgspec.structs.replace(process, boot="another"))  # rebooted since
    for each in ended:
        RunFolder(path).process.write_bytes(msgspec.json.encode(each))
        found = load_folder(path)
        assert found.state == "lost" and "left no report" in found.exit["message"]


def test_of_a_process_on_another_machine_its_silence_tells(tmp_path: Path) -> None:
    path = a_run(tmp_path)
    elsewhere = msgspec.structs.replace(own_process(), host="n2", boot="b", machine="m")
    RunFolder(path).process.write_bytes(msgspec.json.encode(elsewhere))
    assert load_folder(path).state == "running"
    for each in (path / "config", *path.glob("[lmc]*"), *path.glob("[lmc]*/*")):
        os.utime(each, (1.0, 1.0))
    assert load_folder(path).state == "lost"


def test_runs_are_listed_without_a_server(tmp_path: Path) -> None:
    a_run(tmp_path / "runs", {"code": 0, "reason": "SIGTERM"})
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PHALANX_")}
    given = kept | {"HOME": str(tmp_path)}
    done = run_phalanx("runs", "ls", environment=given, folder=tmp_path)
    assert done.returncode == 0 and "no server answers here" in done.stderr
    assert "stopped" in done.stdout and "19/60" in done.stdout
