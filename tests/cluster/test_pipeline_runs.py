"""Pipelines in the core: jobs do the steps, and the log is all that a run needs to go on."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from phalanx.cluster.core import Core
from phalanx.cluster.jobs.job import ClusterJob, GangShape, JobSpec
from phalanx.cluster.pipeline_runs import (
    KEY_PLACE,
    LIMITS,
    ORDER_PLACE,
    input_place,
    machine_of,
)
from phalanx.cluster.pipelines.events import Output, ReleaseRead, RunBegan, TaskResult
from phalanx.cluster.pipelines.step_order import (
    MOST_ORDER_BYTES,
    StepReport,
    decode_order,
    decode_record,
)
from phalanx.cluster.protocol.commands import Accept, Refuse
from phalanx.cluster.protocol.events import (
    AnswerPipeline,
    Cancel,
    CancelPipeline,
    JobFinished,
    SubmitPipeline,
)
from tests.cluster.drive import SECOND, Drive

CPU = GangShape(replicas=1, slot_gpus=0)
WORD = f"run {ORDER_PLACE}"
RANKS = JobSpec(
    name="train",
    gang=GangShape(replicas=8, slot_gpus=8),
    payload=f"{input_place('corpus')} work/{KEY_PLACE}",
)
STEPS: dict[str, Any] = {
    "make": {"command": ["true"], "inputs": {"text": "a.txt"}, "outputs": {"out": "out"}},
    "train": {
        "kind": "train",
        "job": "job.toml",
        "inputs": {"corpus": "make.out"},
        "outputs": {"run": "run"},
    },
    "measure": {
        "command": ["true"],
        "inputs": {"run": "train.run"},
        "outputs": {"scores": "s.json"},
        "scores": ["loss"],
    },
    "gate": {"kind": "gate", "require": ["measure.loss < 2"]},
    "ask": {"kind": "approval", "question": "go?", "after": ["gate"]},
    "tell": {"kind": "notify", "url": "http://x", "after": ["ask"]},
}


class PipelineDrive(Drive):
    """A core whose jobs end as the test says."""

    def begin(self, steps: dict[str, Any] | None = None, **fields: Any) -> int:
        table = {"name": "p", "steps": steps or STEPS}
        asked = SubmitPipeline(
            **{
                "user": "ada",
                "team": "default",
                "folder": "/shared/p",
                "pipeline": table,
                "inputs": {"a.txt": "raw", "job.toml": "job"},
                "version": "1",
                "parallel": 4,
                "work": {name: step_job(name) for name in table["steps"]},
                "ranks": {"train": RANKS} if "train" in table["steps"] else {},
                "request": "r",
                **fields,
            }
        )
        self.tell(asked)
        self.wait(SECOND)
        return max(self.core.view.pipelines, default=0)

    def states(self, number: int = 1) -> dict[str, str]:
        tasks = self.core.pipeline_machine(number).tasks
        return {name: str(each.state) for name, each in tasks.items()}

    def job(self, task: str, number: int = 1) -> ClusterJob:
        return self.core.view.jobs[self.core.view.pipelines[number].under_way[task].job]

    def finish(self, task: str, report: StepReport | None = None, number: int = 1) -> None:
        job = self.job(task, number)
        self.run(job)
        result = msgspec.json.encode(report).decode() if report is not None else ""
        done = JobFinished(job=job.id, generation=job.generation, step=0, result=result)
        self.tell(done, SECOND)
        self.wait(SECOND)

    def make(self, task: str, **scores: float) -> None:
        """A task's job ends with all that it should make."""
        key = self.core.pipeline_machine(1).tasks[task].key
        outputs = {
            name: Output(f"store/{key}/{path}", f"hash of {task}")
            for name, path in STEPS[task].get("outputs", {}).items()
        }
        self.finish(task, StepReport(result=TaskResult(outputs, scores)))

    def restart(self) -> None:
        """The controller is lost; another one goes on from its snapshot."""
        self.core = Core.restore(self.core.snapshot())


def step_job(name: str) -> JobSpec:
    return JobSpec(name=name, gang=CPU, payload=WORD, reports_steps=False, retries=0)


@pytest.mark.parametrize("restarts", [False, True])
def test_steps_are_jobs_and_a_run_goes_on_from_the_log_alone(restarts: bool) -> None:
    drive = PipelineDrive()
    number = drive.begin()
    assert [each.request for each in drive.bodies(Accept)] == ["r"]

    def then() -> None:
        if restarts:
            drive.restart()

    then()
    assert drive.states() == {
        "make": "running",
        **dict.fromkeys(("train", "measure", "gate", "ask", "tell"), "waiting"),
    }
    order = decode_order(drive.job("make").spec.payload.removeprefix("run "))
    assert order.folder == "/shared/p" and order.inputs["text"][0].path == "a.txt"
    drive.make("make")
    then()
    ranks = drive.job("train")
    key = drive.core.pipeline_machine(number).tasks["train"].key
    before = drive.core.pipeline_machine(number).tasks["make"].key
    assert ranks.spec.payload == f"/shared/p/store/{before}/out work/{key}"
    drive.finish("train")
    then()
    assert drive.job("train").id != ranks.id and drive.states()["train"] == "running"
    drive.make("train")
    then()
    drive.make("measure", loss=1.5)
    then()
    assert drive.states() == {
        **dict.fromkeys(("make", "train", "measure", "gate"), "done"),
        "ask": "asking",
        "tell": "waiting",
    }
    drive.tell(AnswerPipeline(pipeline=number, task="ask", approved=True, by="ada", request="a"))
    drive.wait(SECOND)
    then()
    told = decode_order(drive.job("tell").spec.payload.removeprefix("run "))
    assert told.scores == {"measure": {"loss": 1.5}} and told.states["ask"] == "done"
    drive.finish("tell", StepReport(result=TaskResult()))
    assert set(drive.states().values()) == {"done"}
    assert drive.core.view.pipelines[number].ended_ns
    assert drive.core.snapshot() == Core.restore(drive.core.snapshot()).snapshot()


def test_the_name_of_a_raw_file_becomes_no_part_of_a_payload() -> None:
    """It was not checked with the payload, and could make another one of it."""
    drive, name = PipelineDrive(), 'a", "environment": {"A": "B'
    steps = {"make": {"command": ["true"], "inputs": {"text": name}, "outputs": {"out": "out"}}}
    payload = f'{{"argv": ["{input_place("text")}"]}}'
    work = JobSpec(name="make", gang=CPU, payload=payload, reports_steps=False, retries=0)
    drive.begin(steps, inputs={name: "0"}, work={"make": work})
    assert drive.job("make").spec.payload == '{"argv": [""]}'


def test_what_earlier_runs_made_and_approved_is_not_done_again() -> None:
    drive = PipelineDrive()
    drive.begin()
    for task in ("make", "train", "train", "measure"):
        drive.make(task, **({"loss": 1.5} if task == "measure" else {}))
    drive.tell(AnswerPipeline(pipeline=1, task="ask", approved=True))
    drive.wait(SECOND)
    drive.finish("tell", StepReport(result=TaskResult()))
    before = drive.core.view.pipelines[1].results
    kept = {key: each for key, each in before.items() if each.outputs}
    assert drive.begin(results=kept) == 2
    done = {**dict.fromkeys(("make", "train", "measure", "ask"), "cached"), "gate": "done"}
    assert drive.states(2) == {**done, "tell": "running"}


def test_a_failed_job_is_a_failed_attempt_and_is_tried_again_after_its_pause() -> None:
    drive = PipelineDrive()
    steps = {
        "make": {**STEPS["make"], "retries": 1, "backoff_seconds": 30},
        "next": {"command": ["true"], "after": ["make"]},
    }
    drive.begin(steps)
    first = drive.job("make")
    drive.tell(Cancel(job=first.id))
    assert drive.states()["make"] == "retrying"
    drive.restart()
    drive.wait(29 * SECOND)
    assert drive.states()["make"] == "retrying"
    drive.wait(3 * SECOND)
    second = drive.job("make")
    assert second.id != first.id
    drive.finish("make", StepReport())
    assert drive.states() == {"make": "failed", "next": "blocked"}
    reason = drive.core.pipeline_machine(1).tasks["make"].reason
    assert reason == f"job {second.id} succeeded, but left no result"


@pytest.mark.parametrize(
    "result",
    [
        TaskResult(),
        TaskResult({"scores": Output("/etc/passwd", "x")}, {"loss": 1.0}),
        TaskResult({"scores": Output('store/"x', "x")}, {"loss": 1.0}),
    ],
)
def test_a_result_that_says_other_things_than_it_should_is_a_failure(result: TaskResult) -> None:
    drive = PipelineDrive()
    drive.begin({"measure": {**STEPS["measure"], "inputs": {}}})
    drive.finish("measure", StepReport(result=result))
    assert drive.states() == {"measure": "failed"}
    key = drive.core.pipeline_machine(1).tasks["measure"].key
    steps = {"measure": {**STEPS["measure"], "inputs": {}}}
    drive.begin(steps, results={key: result})  # nor is it believed of whoever submits
    assert drive.states(2) == {"measure": "running"}


def test_the_time_of_an_attempt_begins_when_its_job_leaves_the_queue() -> None:
    drive = PipelineDrive(nodes=1)
    blocker = drive.submit(gang=GangShape(replicas=1, slot_gpus=8, whole_nodes=True))
    drive.begin({"make": {**STEPS["make"], "timeout_minutes": 1}})
    drive.wait(600 * SECOND)
    assert drive.states() == {"make": "running"}
    drive.tell(Cancel(job=blocker.id))
    drive.wait(2 * SECOND)
    drive.run(drive.job("make"))
    drive.wait(120 * SECOND)
    assert drive.states() == {"make": "failed"}
    assert "took more than 1 minutes" in drive.core.pipeline_machine(1).tasks["make"].reason


def test_a_release_is_read_by_a_job_when_its_gate_is_reached() -> None:
    drive = PipelineDrive()
    steps = {
        "measure": {**STEPS["measure"], "inputs": {}},
        "gate": {"kind": "gate", "model": "m", "require": ["measure.loss <= released + 0.5 %"]},
    }
    drive.begin(steps)
    drive.make("measure", loss=1.02)
    assert drive.states()["gate"] == "looking"
    order = decode_order(drive.job("gate").spec.payload.removeprefix("run "))
    assert order.release_of == "m"
    drive.restart()
    drive.finish("gate", StepReport(release=ReleaseRead(0, "", 3, {"loss": 1.0})))
    assert drive.states()["gate"] == "failed"
    assert "released: 1" in drive.core.pipeline_machine(1).tasks["gate"].reason


def test_a_cancelled_run_ends_its_jobs() -> None:
    drive = PipelineDrive()
    drive.begin()
    job = drive.job("make")
    drive.tell(CancelPipeline(pipeline=1, by="ada", why="the wrong corpus"))
    assert job.state == "cancelled" and set(drive.states().values()) == {"cancelled"}
    reason = drive.core.pipeline_machine(1).tasks["make"].reason
    assert reason == "cancelled by ada: the wrong corpus"
    assert not drive.core.view.pipelines[1].under_way
    assert drive.begin() == 2  # the folder is free again


@pytest.mark.parametrize("how", ["done", "cancelled"])
def test_when_a_run_has_ended_one_job_gets_all_that_happened_to_write_its_manifest(
    how: str,
) -> None:
    drive = PipelineDrive()
    writer = JobSpec(name="writer", gang=CPU, payload=f'["write","{ORDER_PLACE}"]')
    tell = {"kind": "notify", "url": f"http://{'x' * 50_000}"}
    drive.begin({"tell": tell, "again": {**tell, "after": ["tell"]}}, manifest=writer)
    drive.restart()
    if how == "done":
        drive.finish("tell", StepReport(result=TaskResult()))
        drive.finish("again", StepReport(result=TaskResult()))
    else:
        drive.tell(CancelPipeline(pipeline=1, by="ada"))
    (job,) = (job for job in drive.core.view.jobs.values() if job.spec.name == "writer")
    word, *words = msgspec.json.decode(job.spec.payload)
    assert word == "write" and len(words) > 1
    assert all(len(each) <= MOST_ORDER_BYTES for each in words)
    record = decode_record(words)
    assert (record.folder, record.run) == ("/shared/p", "server-0001")
    began = record.events[0]
    assert isinstance(began, RunBegan)
    machine = machine_of(began.pipeline)
    for event in record.events:
        machine.handle(event)
    assert machine.state == how
    with pytest.raises(ValueError, match="not a record of a run"):
        decode_record(words[:1])


def test_times_of_a_run_in_a_snapshot_of_the_format_before_are_read() -> None:
    drive = PipelineDrive()
    drive.begin({"make": {**STEPS["make"], "retries": 1, "backoff_seconds": 30}})
    drive.tell(Cancel(job=drive.job("make").id))
    written = msgspec.json.decode(drive.core.snapshot())
    for event in written["pipelines"][0]["events"]:
        event["time"] = event.pop("time_ns") / SECOND
    old = {**written, "version": 18}
    found = Core.restore(msgspec.json.encode(old))
    assert found.pipeline_machine(1).next_time_ns() == drive.core.pipeline_machine(1).next_time_ns()


def one_step(**step: Any) -> dict[str, Any]:
    return {"pipeline": {"name": "p", "steps": {"a": {"command": ["x"], **step}}}}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (one_step(after=["b"]), "there is no such step"),
        ({"inputs": {}}, "lacks the hash of a.txt"),
        (one_step(outputs={"o": 'a"b'}), "without quotes"),
        (one_step(for_each={"n": list(range(LIMITS.tasks + 1))}), "tasks, and 500 is the most"),
        ({"work": {"make": JobSpec(name="x", gang=GangShape(replicas=10**6))}}, ""),
    ],
)
def test_what_cannot_run_is_refused_as_a_whole(fields: dict[str, Any], said: str) -> None:
    drive = PipelineDrive()
    assert drive.begin(**fields) == 0
    (refused,) = drive.bodies(Refuse)
    assert said in str(refused.reason) and not drive.core.view.jobs


def test_a_second_run_in_the_same_folder_waits_for_the_end_of_the_first() -> None:
    drive = PipelineDrive()
    drive.begin()
    assert drive.begin() == 1
    (refused,) = drive.bodies(Refuse)
    assert "run 1 uses /shared/p" in str(refused.reason)
    wrong = AnswerPipeline(pipeline=1, task="ask", approved=True, request="a")
    drive.tell(wrong)
    drive.tell(CancelPipeline(pipeline=7))
    said = [str(each.reason) for each in drive.bodies(Refuse)[1:]]
    assert said == ["pipeline run 1 asks nothing called ask", "there is no pipeline run 7"]


def test_a_user_has_so_many_runs_at_a_time_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.cluster.pipeline_runs.MOST_RUNS", 2)
    drive = PipelineDrive()
    for number in range(3):
        drive.begin(folder=f"/shared/{number}")
    (refused,) = drive.bodies(Refuse)
    assert "ada has 2 runs of pipelines that have not ended" in str(refused.reason)
    assert drive.begin(folder="/shared/3", user="bob") == 3
    drive.tell(CancelPipeline(pipeline=1))
    assert drive.begin(folder="/shared/4") == 4
