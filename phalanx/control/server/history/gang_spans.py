"""OpenTelemetry spans of gangs (extra ``otel``): a trace a job, a span a phase of a generation.

The trace's and the root's numbers are derived from the job, so that spans of two servers, one of
which took over from the other, are one trace. The root is told when the job ends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, Status, StatusCode, TraceFlags

from phalanx import __version__
from phalanx.cluster.core import Core
from phalanx.cluster.jobs.job import ClusterJob, JobState
from phalanx.cluster.protocol.commands import Command, job_of
from phalanx.cluster.protocol.events import Event, Progress

TOLD = ("reason", "rank", "node", "cause", "slowdown_ppm", "step")  # of an event, if it has them


class _Ids(RandomIdGenerator):
    """Random numbers, but for a span whose numbers are known already."""

    known: SpanContext | None = None

    def generate_span_id(self) -> int:
        return self.known.span_id if self.known else super().generate_span_id()

    def generate_trace_id(self) -> int:
        return self.known.trace_id if self.known else super().generate_trace_id()


class Spans:
    """Where spans go; one for the life of a server."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._ids = _Ids()
        resource = Resource.create({"service.name": "phalanx", "service.version": __version__})
        self._provider = TracerProvider(id_generator=self._ids, resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("phalanx", __version__)

    def phase(self, name: str, job: SpanContext, start_ns: int, facts: dict[str, Any]) -> Span:
        """A span below a job's root."""
        above = trace.set_span_in_context(NonRecordingSpan(job), Context())
        return self._tracer.start_span(name, above, start_time=start_ns, attributes=facts)

    def root(self, name: str, job: SpanContext, start_ns: int, facts: dict[str, Any]) -> Span:
        """The span of a whole job."""
        self._ids.known = job
        try:
            return self._tracer.start_span(name, Context(), start_time=start_ns, attributes=facts)
        finally:
            self._ids.known = None

    def close(self) -> None:
        """Send what waits."""
        self._provider.shutdown()


class GangSpans:
    """Follows the log; one a leadership."""

    def __init__(self, core: Core, spans: Spans) -> None:
        self._core, self._spans = core, spans
        self._open: dict[int, tuple[str, Span]] = {}  # by job: what it does now
        for number in core.view.active:
            self._look(core.view.jobs[number], core.view.now_ns, taken_over=True)

    def heard(self, event: Event, commands: Sequence[Command]) -> None:
        """An event was handled."""
        bodies = (event.body, *(command.body for command in commands))
        for number in dict.fromkeys(job_of(body) for body in bodies):
            job = self._core.view.jobs.get(number)
            if job is None:
                continue
            if number in self._open and not isinstance(event.body, Progress):
                self._open[number][1].add_event(
                    type(event.body).__name__, _told(event), event.time_ns
                )
            self._look(job, event.time_ns)

    def close(self) -> None:
        """This server leads no more: what is open ends here and goes on at the next one."""
        for _, span in self._open.values():
            span.end(self._core.view.now_ns)
        self._open.clear()

    def _look(self, job: ClusterJob, now_ns: int, *, taken_over: bool = False) -> None:
        name = _phase(job)
        before = self._open.get(job.id)
        if before is not None and before[0] == name:
            return
        if before is not None:
            before[1].end(now_ns)
            del self._open[job.id]
        if job.ended:
            if before is not None:
                self._end(job, now_ns)
            return
        facts = {**_facts(job), "phalanx.taken_over": taken_over, "phalanx.why": str(job.why)}
        start_ns = now_ns if taken_over or before else job.submitted_ns
        span = self._spans.phase(name.partition("#")[0], _context(job), start_ns, facts)
        self._open[job.id] = name, span

    def _end(self, job: ClusterJob, now_ns: int) -> None:
        facts = {**_facts(job), "phalanx.state": job.state, "phalanx.why": str(job.why)}
        root = self._spans.root(f"job {job.spec.name}", _context(job), job.submitted_ns, facts)
        if job.state == JobState.FAILED:
            root.set_status(Status(StatusCode.ERROR, str(job.why)))
        root.end(now_ns)


def otlp(url: str) -> Spans:
    """Spans for a collector that speaks OTLP over HTTP."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return Spans(OTLPSpanExporter(endpoint=f"{url.rstrip('/')}/v1/traces"))


def _context(job: ClusterJob) -> SpanContext:
    digest = hashlib.sha256(f"phalanx {job.id} {job.submitted_ns}".encode()).digest()
    return SpanContext(
        int.from_bytes(digest[:16], "big"),
        int.from_bytes(digest[16:24], "big"),
        is_remote=True,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
    )


def _phase(job: ClusterJob) -> str:
    """What a job does, unlike its next generation's same phase."""
    gang = job.gang
    return f"{gang.phase}#{job.generation}" if gang is not None else f"{job.state}#"


def _facts(job: ClusterJob) -> dict[str, Any]:
    nodes = len(job.placement.nodes) if job.placement is not None else 0
    return {
        "phalanx.job": job.id,
        "phalanx.name": job.spec.name,
        "phalanx.team": job.spec.team,
        "phalanx.generation": job.generation,
        "phalanx.nodes": nodes,
        "phalanx.step": job.step,
    }


def _told(event: Event) -> dict[str, Any]:
    attributes: dict[str, Any] = {"phalanx.event": event.sequence}
    for name in TOLD:
        value = getattr(event.body, name, None)
        if isinstance(value, str | int):
            attributes[f"phalanx.{name}"] = value
    return attributes
