"""A gang's life as OpenTelemetry sees it."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("opentelemetry.sdk", reason="pip install 'phalanx[otel]'")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from phalanx.cluster.protocol.events import Cancel, JobFinished
from phalanx.cluster.protocol.messages import WorkerExited
from phalanx.control.server.history.gang_spans import GangSpans, Spans
from tests.cluster.drive import SECOND, Drive
from tests.control.servers import WORK, PlayedAgent, ServerProcess
from tests.receivers import HttpReceiver


class Traced(Drive):
    """A core by hand, with its spans in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.exporter = InMemorySpanExporter()
        self.spans = Spans(self.exporter)
        self.gangs = GangSpans(self.core, self.spans)

    def _hand(self, body):  # type: ignore[no-untyped-def]
        commands = super()._hand(body)
        self.gangs.heard(self.log[-1], commands)
        return commands

    def told(self) -> list[ReadableSpan]:
        """All that was said, now that no more follows."""
        self.spans.close()
        return sorted(self.exporter.get_finished_spans(), key=lambda span: span.start_time or 0)


def test_every_phase_of_every_generation_is_a_span_below_the_jobs() -> None:
    drive = Traced()
    job = drive.submit()
    drive.run(job)
    exited = WorkerExited(job=job.id, generation=1, node=job.placement.nodes[0], rank=3, cause="x")
    drive.tell(exited, SECOND)
    drive.wait(5 * SECOND)  # what else may be wrong is waited for
    drive.run(job)
    drive.tell(JobFinished(job=job.id, generation=job.generation, step=9), SECOND)
    found = drive.told()
    phases = [span.name for span in found if span.name != "job job"]
    assert phases[0] == "pending"
    assert phases.count("joining") == 2 and phases.count("running") == 2
    (root,) = [span for span in found if span.name == "job job"]
    assert {span.context.trace_id for span in found} == {root.context.trace_id}
    assert all(s.parent.span_id == root.context.span_id for s in found if s is not root)
    assert root.parent is None and root.attributes["phalanx.state"] == "done"
    assert root.start_time == job.submitted_ns
    ends = [(span.start_time, span.end_time) for span in found if span is not root]
    assert all(end == start for (_, end), (start, _) in pairwise(ends))
    (first_run, _) = [span for span in found if span.name == "running"]
    told = [event for event in first_run.events if event.name == "WorkerExited"]
    assert told[0].attributes["phalanx.rank"] == 3


def test_a_server_that_takes_over_goes_on_with_the_same_trace() -> None:
    drive = Traced()
    job = drive.submit()
    drive.run(job)
    drive.gangs.close()
    drive.gangs = GangSpans(drive.core, drive.spans)
    drive.tell(Cancel(job=job.id), SECOND)
    drive.wait(60 * SECOND)
    found = drive.told()
    assert len({span.context.trace_id for span in found}) == 1
    assert [span.attributes["phalanx.taken_over"] for span in found if span.name == "running"] == [
        False,
        True,
    ]
    assert all(span.status.status_code is not StatusCode.ERROR for span in found)


def test_a_collector_is_sent_the_gangs_spans(tmp_path: Path) -> None:
    with (
        HttpReceiver() as collector,
        ServerProcess(tmp_path / "state", "--otlp", collector.url) as server,
    ):
        join = (server.state / "join.token").read_text().strip()

        async def scenario() -> None:
            agent = PlayedAgent([server.url], join, "n0")
            agent.steps_until = 10_000
            running = asyncio.create_task(agent.run())
            await agent.connected.wait()
            body = {"spec": {"name": "seen", "gang": {"slot_gpus": 1}}, "work": WORK}
            job = (await asyncio.to_thread(server.call, "POST", "/v1/jobs", body))[1]["jobs"][0]
            path, wait_for = f"/v1/jobs/{job}", server.wait_for
            await asyncio.to_thread(wait_for, path, lambda a: a["job"]["state"] == "running")
            await asyncio.to_thread(server.call, "POST", f"{path}/cancel")
            await asyncio.to_thread(wait_for, path, lambda a: a["job"]["state"] == "cancelled")
            running.cancel()

        asyncio.run(scenario())
        server.stop()  # what waits is sent
    names = {
        span.name
        for data in collector.got
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    }
    assert {"pending", "running", "job seen"} <= names


def test_an_address_that_is_none_is_refused_in_words(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "state", "--otlp", "collector:4318").start(wait=False)
    assert server.process is not None and server.process.wait(90) != 0
    assert "--otlp" in server.output()
