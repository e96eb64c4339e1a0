"""Endpoints about runs of pipelines, which the core drives through its jobs."""

from __future__ import annotations

from collections import Counter

import msgspec
from msgspec import structs

from phalanx.cluster.core import Core
from phalanx.cluster.jobs.job import JobSpec
from phalanx.cluster.pipeline_runs import LIMITS, machine_of
from phalanx.cluster.pipelines.events import AnyEvent, LookedUp, LookUp, RunBegan, TaskState
from phalanx.cluster.pipelines.machine import PipelineMachine, TaskProgress
from phalanx.cluster.pipelines.templates import builtin
from phalanx.cluster.protocol.events import AnswerPipeline, CancelPipeline, SubmitPipeline
from phalanx.cluster.state import ClusterPipeline
from phalanx.cluster.units import HOUR_NS
from phalanx.config import ConfigError
from phalanx.control.server.http.endpoints import EVERYBODY, WRITERS, ApiError, Call, Endpoints
from phalanx.control.server.http.job_rights import refuse_unconfirmed, rightful
from phalanx.control.trust.secrets import plain_secrets
from phalanx.control.wire import api_types as t

ENDPOINTS = Endpoints()


@ENDPOINTS.add("POST /v1/pipelines", WRITERS, body=t.PipelineRequest, status=201, audited=True)
async def run_pipeline(call: Call) -> t.PipelineStarted:
    """Start a run of a pipeline.

    Its steps are jobs; it goes on whoever is away.
    """
    body = call.body
    to_do = await call.server.read(_checked_to_do, body)
    work: dict[str, JobSpec] = {}
    ranks: dict[str, JobSpec] = {}
    notes: list[str] = []
    for each in body.work:
        work[each.task], told = await rightful(call, each.step.spec, each.step.work)
        notes += told
        if each.ranks is not None:
            ranks[each.task], told = await rightful(call, each.ranks.spec, each.ranks.work)
            notes += told
    manifest = None
    if body.manifest is not None:
        manifest, _ = await rightful(call, body.manifest.spec, body.manifest.work)
    to_pay = [spec for name, spec in ranks.items() if name in to_do]
    refuse_unconfirmed(call, to_pay, confirmed=body.confirmed)
    owner = next(iter(work.values())) if work else None
    order = SubmitPipeline(
        user=owner.user if owner else call.token.name,
        team=owner.team if owner else call.token.team or "default",
        folder=body.folder,
        pipeline=body.pipeline,
        inputs={each.pattern: each.content for each in body.inputs},
        version=body.version,
        parallel=body.parallel,
        work=work,
        ranks=ranks,
        manifest=manifest,
        results={each.key: each.result for each in body.results},
    )
    done = await call.order(order)
    answer = structs.asdict(done) | {
        "message": "; ".join(dict.fromkeys([done.message, *notes])),
        "pipeline": _newest(call.leading.core, order),
    }
    return t.PipelineStarted(**answer)


def _checked_to_do(body: t.PipelineRequest) -> set[str]:
    """Tasks of what is asked for that have no result yet; ApiError where it cannot be run."""
    machine = _checked(body)
    if missing := _missing_inputs(machine, body):
        raise ApiError(409, "bad_pipeline", f"inputs: the hash of {missing} is missing")
    return _to_do(machine, body)


def _checked(body: t.PipelineRequest) -> PipelineMachine:
    """The machine of what is asked for; ApiError where it is no pipeline for a server."""
    if not body.folder.startswith("/"):
        raise ApiError(409, "bad_pipeline", "folder: must be an absolute path")
    try:
        machine = machine_of(body.pipeline, LIMITS)
    except ConfigError as error:
        raise ApiError(409, "bad_pipeline", str(error)) from None
    text = msgspec.json.encode(body.pipeline).decode()
    for name in builtin():
        if f"{{{name}}}" in text:
            raise ApiError(409, "bad_pipeline", f"{{{name}}} must be filled in by the client")
    for name, step in machine.pipeline.steps.items():
        if secret := plain_secrets(step.environment):
            rule = "would stand in the server's log as it is: write secret-file:/path"
            raise ApiError(409, "bad_pipeline", f"steps.{name}.environment.{secret[0]} {rule}")
    return machine


def _to_do(machine: PipelineMachine, body: t.PipelineRequest) -> set[str]:
    """Tasks that no result is there for, as far as that can be said before anything runs."""
    results = {each.key: each.result for each in body.results}
    inputs = {each.pattern: each.content for each in body.inputs}
    waiting: list[AnyEvent] = [RunBegan(0, body.pipeline, inputs, body.version, parallel=0)]
    while waiting:
        waiting += [
            LookedUp(0, action.task, results.get(action.key))
            for action in machine.handle(waiting.pop())
            if isinstance(action, LookUp)
        ]
    cached = {TaskState.CACHED, TaskState.DONE}
    return {name for name, each in machine.tasks.items() if each.state not in cached}


def _missing_inputs(machine: PipelineMachine, body: t.PipelineRequest) -> str:
    """Raw files of which nobody said what they hold; "": none."""
    known = {each.pattern for each in body.inputs}
    tasks = (each.task for each in machine.tasks.values())
    return next((each for task in tasks for each in task.raw_patterns if each not in known), "")


def _newest(core: Core, order: SubmitPipeline) -> int:
    runs = core.view.pipelines.values()
    same = (run.id for run in runs if (run.folder, run.team) == (order.folder, order.team))
    return max(same, default=0)


@ENDPOINTS.add("GET /v1/pipelines", EVERYBODY)
async def list_pipelines(call: Call) -> t.PipelineList:
    """List the runs of pipelines that the caller may see, newest first."""
    runs = call.leading.core.view.pipelines.values()
    seen = [run for run in reversed(runs) if call.sees(run.team)]
    return t.PipelineList(pipelines=[_run_out(call, run) for run in seen])


@ENDPOINTS.add(
    "GET /v1/pipelines/{pipeline}", EVERYBODY, params=t.PipelinePath, query=t.PipelineQuery
)
async def show_pipeline(call: Call) -> t.PipelineDetail:
    """Show a run of a pipeline: its tasks, their times, costs and results."""
    run = _run(call)
    machine = call.leading.core.pipeline_machine(run.id)
    return t.PipelineDetail(
        run=_run_out(call, run),
        tasks=[_task_out(call, run, each) for each in machine.tasks.values()],
        events=[
            msgspec.Raw(msgspec.json.encode(event)) for event in run.events[call.query.after :]
        ],
    )


@ENDPOINTS.add(
    "POST /v1/pipelines/{pipeline}/answer",
    WRITERS,
    params=t.PipelinePath,
    body=t.TaskDecision,
    audited=True,
)
async def answer_pipeline(call: Call) -> t.Done:
    """Approve or reject a step that needs a person's decision."""
    decision = AnswerPipeline(
        pipeline=_run(call).id,
        task=call.body.task,
        approved=call.body.approve,
        by=call.token.name,
        why=call.body.why,
    )
    return await call.order(decision)


@ENDPOINTS.add(
    "POST /v1/pipelines/{pipeline}/cancel",
    WRITERS,
    params=t.PipelinePath,
    body=t.OrderWhy,
    optional_body=True,
    audited=True,
)
async def cancel_pipeline(call: Call) -> t.Done:
    """Cancel a run of a pipeline; completed steps stay completed."""
    number, by, why = _run(call).id, call.token.name, call.body.why
    return await call.order(CancelPipeline(pipeline=number, by=by, why=why))


def _run(call: Call) -> ClusterPipeline:
    """The run in the path. One of another team is not there, as far as the caller knows."""
    run = call.leading.core.view.pipelines.get(call.path.pipeline)
    if run is None or not call.sees(run.team):
        raise ApiError(404, "no_such_pipeline", f"there is no pipeline run {call.path.pipeline}")
    return run


def _run_out(call: Call, run: ClusterPipeline) -> t.PipelineOut:
    machine = call.leading.core.pipeline_machine(run.id)
    tasks = machine.tasks.values()
    gpu_hours = sum(_gpu_hours(call, run, each) for each in tasks)
    return t.PipelineOut(
        id=run.id,
        name=machine.pipeline.name,
        user=run.user,
        team=run.team,
        folder=run.folder,
        state=machine.state,
        began_ns=run.began_ns,
        ended_ns=run.ended_ns,
        states=dict(Counter(each.state.value for each in tasks)),
        gpu_hours=gpu_hours,
        dollars=_dollars(call, gpu_hours),
    )


def _task_out(call: Call, run: ClusterPipeline, progress: TaskProgress) -> t.PipelineTask:
    task = progress.task
    gpu_hours = _gpu_hours(call, run, progress)
    return t.PipelineTask(
        name=task.name,
        step=task.step_name,
        kind=task.step.kind,
        state=progress.state,
        reason=progress.reason,
        question=task.step.question if progress.state is TaskState.ASKING else "",
        waits_for=tuple(each.task for each in task.waits),
        attempts=progress.attempts,
        seconds=_seconds(call, progress),
        gpu_hours=gpu_hours,
        dollars=_dollars(call, gpu_hours),
        job=run.newest_jobs.get(task.name, 0),
        key=progress.key,
        result=progress.result,
    )


def _gpu_hours(call: Call, run: ClusterPipeline, progress: TaskProgress) -> float:
    """Of all attempts: those that failed cost as much."""
    name = progress.task.name
    spec = run.ranks.get(name) or run.work.get(name)
    gpus = spec.gang.gpus(spec.gang.replicas) if spec is not None else 0
    return progress.used_ns(call.leading.controller.clock.now_ns()) * gpus / HOUR_NS


def _seconds(call: Call, progress: TaskProgress) -> float:
    """Of the last attempt; of one that runs, so far. One that was not begun took no time."""
    if progress.state is TaskState.RUNNING and progress.begun_ns:
        return max(0, call.leading.controller.clock.now_ns() - progress.begun_ns) / 1e9
    return progress.took_ns / 1e9 if progress.attempts else 0.0


def _dollars(call: Call, gpu_hours: float) -> float:
    price = call.leading.core.view.policy.price.micro_dollars_per_gpu_hour
    return gpu_hours * price / 1e6
