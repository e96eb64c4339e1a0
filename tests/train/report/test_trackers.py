"""Trackers run beside the training: neither their slowness nor their failure reaches it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from phalanx.config import ConfigError
from phalanx.train.report import trackers
from phalanx.train.report.records import Record
from phalanx.train.report.run_folder import RunFolder
from phalanx.train.report.sinks import Sinks
from phalanx.train.report.trackers import Mlflow, Send, Tracker, Wandb, check_available
from tests.train.forked_runs import small_job
from tests.train.sample_records import step_record


class Notebook(Tracker):
    """Keeps the numbers of steps; a test holds its pen with ``ready``."""

    def __init__(self, folder: Path, broken_at: int | None = None) -> None:
        self.ready = threading.Event()
        self.steps: list[int] = []
        self.closed = False
        self.broken_at = broken_at
        super().__init__(small_job(folder), RunFolder(folder))

    @contextmanager
    def session(self) -> Iterator[Send]:
        self.ready.wait(30)
        if self.broken_at == 0:
            raise PermissionError("not logged in")
        yield self.send
        self.closed = True

    def send(self, records: list[Record]) -> None:
        for record in records:
            if record.step == self.broken_at:
                raise ConnectionError("server gone")
            self.steps.append(record.step)


def test_records_wait_for_a_slow_tracker_and_all_are_sent_in_order(tmp_path: Path) -> None:
    notebook = Notebook(tmp_path)
    sinks = Sinks([notebook])
    for step in range(1, 6):
        sinks.write([step_record(step)])  # returns although the tracker is not open yet
    assert notebook.steps == []
    notebook.ready.set()
    sinks.close()
    assert notebook.steps == [1, 2, 3, 4, 5] and notebook.closed
    assert not sinks.failures


@pytest.mark.parametrize(
    ("broken_at", "said"),
    [(0, "PermissionError: not logged in"), (2, "ConnectionError: server gone")],
)
def test_a_tracker_that_breaks_is_reported_once_and_ends_no_run(
    tmp_path: Path, broken_at: int, said: str
) -> None:
    notebook = Notebook(tmp_path, broken_at)
    notebook.ready.set()
    sinks = Sinks([notebook])
    for step in range(1, 4):
        sinks.write([step_record(step)])
    sinks.close()
    assert sinks.failures == {"Notebook": said}


def test_what_waits_for_a_silent_tracker_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "WAITING_RECORDS", 3)
    notebook = Notebook(tmp_path)
    sinks = Sinks([notebook])
    for step in range(1, 6):
        sinks.write([step_record(step)])
    assert "3 records wait" in sinks.failures["Notebook"]
    notebook.ready.set()
    sinks.close()
    assert notebook.steps == [1, 2, 3]


def test_the_end_of_a_run_waits_only_so_long_for_a_silent_tracker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.01)
    notebook = Notebook(tmp_path)
    sinks = Sinks([notebook])
    sinks.write([step_record(1)])
    sinks.close()
    assert "TimeoutError" in sinks.failures["Notebook"]
    notebook.ready.set()
    notebook.thread.join(30)  # no thread may be left when later tests fork


def test_a_failed_run_is_a_failed_one_in_mlflow_with_its_settings_tags_and_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    job = small_job(tmp_path, log__tags='["lab=vision", "first"]', log__artifacts='["config"]')
    folder = RunFolder(tmp_path / "run")
    folder.config.mkdir(parents=True)
    (folder.config / "job.json").write_text("{}")
    for failed in (False, True):
        sinks = Sinks([Mlflow(job, folder)])
        sinks.write([step_record(1)])
        if failed:
            sinks.fail(ValueError("no such expert"))
        sinks.close()
        assert not sinks.failures
    bad, good = mlflow.search_runs(experiment_names=[job.name], output_format="list")
    assert (good.info.status, bad.info.status) == ("FINISHED", "FAILED")
    assert bad.data.tags["phalanx.failure"] == "ValueError: no such expert"
    assert bad.data.tags["lab"] == "vision" and "first" in bad.data.tags
    assert good.data.params["train.steps"] == str(job.train.steps)
    client = mlflow.MlflowClient()
    assert [each.path for each in client.list_artifacts(good.info.run_id, "config")] == [
        "config/job.json"
    ]


def test_a_failed_run_is_a_failed_one_in_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = PlayedWandb()
    monkeypatch.setitem(sys.modules, "wandb", played)  # type: ignore[arg-type]
    folder = RunFolder(tmp_path / "run")
    sinks = Sinks([Wandb(small_job(tmp_path, log__tags='["first"]'), folder)])
    sinks.write([step_record(1)])
    sinks.fail(ValueError("no such expert"))
    sinks.close()
    assert not sinks.failures
    assert played.settings["tags"] == ["first"] and played.ended_with == 1
    assert played.summary == {"failure": "ValueError: no such expert"}


class PlayedWandb:
    """What the sink uses of W&B's module and of its run: the real one wants an account."""

    def __init__(self) -> None:
        self.settings: dict[str, object] = {}
        self.summary: dict[str, str] = {}
        self.ended_with = -1

    def init(self, **settings: object) -> PlayedWandb:
        self.settings = settings
        return self

    def define_metric(self, name: str, step_metric: str) -> None: ...

    def log(self, values: dict[str, float]) -> None: ...

    def finish(self, exit_code: int) -> None:
        self.ended_with = exit_code


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_tracker_that_is_not_installed_is_refused_by_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"log\.{name}.*pip install 'phalanx\[{name}\]'"):
        check_available(small_job(tmp_path, **{f"log__{name}": "true"}))
