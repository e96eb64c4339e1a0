"""A simulated log is read as a server's: replayed, asked by the same client, never changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.cluster.protocol.events import Event
from phalanx.control.client.client import Client, ClientError
from phalanx.control.recording import MARK, is_recording
from phalanx.control.recording.write import record
from phalanx.control.wire.api_types import Done, EventList, JobDetail, Status
from phalanx.simulate.draws import SeedDraws
from phalanx.simulate.scenario.load import load_scenario
from phalanx.simulate.scenario.scenario import Scenario
from phalanx.simulate.scenario.workload import submissions
from phalanx.simulate.world.world import World

SCENE = [
    "fleet.gpus=64",
    "fleet.spare_nodes=1",
    "days=0.5",
    "faults.per_1000_node_days=0",
    "faults.causes.gpu_fault=900",
]


def scenario() -> Scenario:
    return load_scenario("llama3-54d", SCENE)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recording") / "scene"
    record(scenario(), 1, folder)
    return folder


@pytest.fixture
def client(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> Client:
    monkeypatch.setenv("PHALANX_SERVER", "http://127.0.0.1:1")  # a recording that is named wins
    return Client("", recorded)


def test_a_recording_tells_every_event_and_state_that_the_world_had(client: Client) -> None:
    played: list[Event] = []
    world = World(scenario(), 1)
    world.listeners.append(lambda event, _: played.append(event))
    world.run(submissions(world.scenario, SeedDraws(1)).jobs)
    told = client.get("/v1/events", EventList, after=0, limit=1000).events
    assert [(e.sequence, e.time_ns, e.kind) for e in told] == [
        (event.sequence, event.time_ns, type(event.body).__name__) for event in played
    ]
    assert any("gpu_fault" in command.why.text for e in told for command in e.commands)
    status = client.get("/v1/status", Status)
    assert status.time_ns == world.end_ns and status.sequence == world.core.sequence
    job, kept = world.view.jobs[1], client.get("/v1/jobs/1", JobDetail).job
    assert (kept.step, kept.generation) == (job.step, job.generation)
    found = client.get("/v1/findings", dict, limit=1000)["findings"]
    assert "worker_exited" in {each["kind"] for each in found}


def test_only_what_was_decided_about_is_told_where_that_is_asked_for(client: Client) -> None:
    everything = client.get("/v1/events", EventList, after=0, limit=1000).events
    decided = client.get("/v1/events", EventList, after=0, limit=1000, decided=True).events
    assert decided == [event for event in everything if event.commands] != everything


def test_a_recording_cannot_be_changed_nor_followed(client: Client) -> None:
    with pytest.raises(ClientError, match="nothing of it can be changed"):
        client.post("/v1/jobs/1/cancel", {}, Done)
    with pytest.raises(ClientError, match="neither ranks' output nor shells"):
        next(client.stream("/v1/jobs/1/logs"))
    with pytest.raises(ClientError, match="neither ranks' output nor shells"):
        client.live("/v1/live")
    with pytest.raises(ClientError, match="no job 7"):
        client.get("/v1/jobs/7", dict)


def test_what_is_no_whole_recording_is_refused_in_words(recorded: Path, tmp_path: Path) -> None:
    (tmp_path / MARK).write_text("{")
    with pytest.raises(ClientError, match="cannot be read as a recording"):
        Client("", tmp_path)
    (tmp_path / MARK).write_bytes((recorded / MARK).read_bytes())
    with pytest.raises(ClientError, match=r"no log\.sqlite: play it again"):
        Client("", tmp_path)
    (tmp_path / "log.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(ClientError, match="not a database"):
        Client("", tmp_path)


def test_a_folder_is_a_recording_only_when_all_of_it_was_written(tmp_path: Path) -> None:
    from phalanx.control.recording.write import RecordingWriter

    RecordingWriter(tmp_path, World(scenario(), 1).core)
    assert not is_recording(tmp_path)
