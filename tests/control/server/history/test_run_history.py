"""What people are told of incidents: since when, why, and when steps went on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from phalanx.cluster.jobs.job import ClusterJob
from phalanx.cluster.protocol.events import GangReady, NodeSilent, NoProgress, Progress
from phalanx.cluster.protocol.messages import WorkerExited
from phalanx.control.server.history.run_history import RunHistory
from phalanx.observe.store.journal import Journal
from tests.cluster.drive import SECOND, Drive


class Told(Drive):
    """A core by hand, and what its history tells."""

    def __init__(self, folder: Path) -> None:
        super().__init__(nodes=8)
        self.told: list[dict[str, Any]] = []
        journal = Journal(folder / "runs.sqlite")
        self.run_history = RunHistory(self.core, journal, lambda kind, job, body: self.note(body))

    def note(self, body: dict[str, Any]) -> None:
        self.told.append(body)

    def _hand(self, body):  # type: ignore[no-untyped-def]
        commands = super()._hand(body)
        if hasattr(self, "run_history"):
            self.run_history.heard(self.log[-1], commands)
        return commands

    def running(self) -> ClusterJob:
        job = self.submit()
        self.run(job)
        self.progress(job, 5)
        return job

    def progress(self, job: ClusterJob, step: int) -> None:
        facts = {"job": job.id, "generation": job.generation, "step": step, "committed": step}
        self.tell(Progress(**facts, durable=0, at_ns=self.now_ns), SECOND)

    def incident(self) -> dict[str, Any]:
        (found,) = [each for each in self.told if each.get("kind") == "incident"]
        return found


@pytest.fixture
def drive(tmp_path: Path) -> Told:
    return Told(tmp_path)


def test_an_incident_is_of_the_failure_and_not_of_the_tick_that_ends_the_wait(drive: Told) -> None:
    job = drive.running()
    failed_ns = drive.now_ns + SECOND
    facts = {"job": job.id, "generation": job.generation}
    nodes = job.placement.nodes
    drive.tell(WorkerExited(**facts, node=nodes[0], rank=0, cause="lost_peer"), SECOND)
    drive.tell(WorkerExited(**facts, node=nodes[1], rank=9, cause="worker_killed"))
    drive.wait(20 * SECOND)  # whatever the core waits for
    drive.run(job)
    ready_ns = next(e.time_ns for e in reversed(drive.log) if isinstance(e.body, GangReady))
    drive.run_history.incidents.went_on(job.id, job.generation, ready_ns + SECOND // 2)
    found = drive.incident()
    assert found["time"] == failed_ns / 1e9
    assert (found["rank"], found["evidence"]["event"]) == (9, "WorkerExited")
    assert found["evidence"]["cause"] == "worker_killed"
    assert found["evidence"]["root_cause_class"] == "software"
    took = found["evidence"]["resumed_seconds"]
    assert took == pytest.approx((ready_ns + SECOND // 2 - failed_ns) / 1e9)
    assert "`phalanx logs 1 --rank 9`" in found["suggestion"]


def test_a_lost_nodes_incident_is_of_its_silence(drive: Told) -> None:
    job = drive.running()
    node = job.placement.nodes[1]
    drive.tell(NodeSilent(node=node, connection_lost=True), SECOND)
    drive.wait(20 * SECOND)
    drive.run(job)
    drive.progress(job, job.step + 3)  # it tells no records: two reports end the incident
    drive.progress(job, job.step + 3)
    found = drive.incident()
    assert found["evidence"]["cause"] == "connection_lost"
    assert found["evidence"]["root_cause_class"] == "hardware"
    assert found["node"] == drive.core.view.fleet.nodes[node].name
    assert found["evidence"]["resumed_seconds"] >= found["evidence"]["restored_seconds"] > 0


def test_a_gang_that_fails_before_its_first_steps_were_told_has_an_incident(drive: Told) -> None:
    job = drive.submit()
    drive.run(job)
    assert job.step == 0
    nodes = (job.placement.nodes[0],)
    drive.tell(NoProgress(job=job.id, generation=job.generation, step=5, nodes=nodes), SECOND)
    drive.wait(20 * SECOND)
    drive.run(job)
    drive.progress(job, 6)
    drive.progress(job, 7)
    assert drive.incident()["evidence"]["step"] == 5


def test_a_failure_of_long_ago_is_not_why_a_gang_forms_again(drive: Told) -> None:
    job = drive.running()
    drive.run_history.incidents._failures[job.id] = (drive.now_ns, drive.log[-1])
    drive.wait(120 * SECOND)
    drive.progress(job, job.step + 1)
    facts = {"job": job.id, "generation": job.generation}
    exited = WorkerExited(**facts, node=job.placement.nodes[0], rank=1, cause="xid")
    drive.tell(exited, SECOND)
    at_ns = drive.now_ns
    drive.wait(20 * SECOND)
    drive.run(job)
    drive.progress(job, job.step + 1)
    drive.progress(job, job.step + 1)
    assert drive.incident()["time"] == at_ns / 1e9


def test_a_failure_before_a_gang_went_on_is_of_that_incident_and_of_no_later_one(
    drive: Told,
) -> None:
    job = drive.running()
    nodes = job.placement.nodes

    def exits(rank: int, generation: int, cause: str) -> int:
        facts = {"job": job.id, "generation": generation}
        drive.tell(WorkerExited(**facts, node=nodes[rank % 2], rank=rank, cause=cause), SECOND)
        at_ns = drive.now_ns
        drive.wait(5 * SECOND)  # whatever the core waits for
        return at_ns

    first_ns = exits(0, job.generation, "worker_killed")
    drive.run(job)
    exits(1, job.generation, "worker_killed")  # again, before it has made a step
    drive.run(job)
    exits(2, job.generation - 1, "worker_killed")  # word of the one before comes late
    drive.progress(job, 6)
    drive.progress(job, 7)
    last_ns = exits(3, job.generation, "keeper_lost")
    drive.run(job)
    drive.progress(job, 8)
    drive.progress(job, 9)
    incidents = [each for each in drive.told if each.get("kind") == "incident"]
    assert [(each["time"], each["rank"]) for each in incidents] == [
        (first_ns / 1e9, 0),
        (last_ns / 1e9, 3),
    ]
