"""Pipeline runs in the core: the machine decides, jobs in the queue run the steps.

What jobs run is opaque here; of their payload only places are filled in: the order of the step, its
key, and the paths of its inputs.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec
from msgspec import structs

from phalanx.cluster.context import Context
from phalanx.cluster.jobs.job import ClusterJob, JobSpec, JobState
from phalanx.cluster.jobs.requests import end_job
from phalanx.cluster.jobs.submission import create, refusal
from phalanx.cluster.pipelines.description import pipeline_from_table
from phalanx.cluster.pipelines.events import (
    AnyEvent,
    AttemptBegan,
    KeepResult,
    LookedUp,
    LookUp,
    ReadRelease,
    RunBegan,
    RunCancelled,
    StartTask,
    StopTask,
    TaskAnswered,
    TaskFailed,
    TaskFinished,
    TaskResult,
    TaskState,
    TimePassed,
)
from phalanx.cluster.pipelines.graph import Task
from phalanx.cluster.pipelines.machine import PipelineMachine, TaskProgress
from phalanx.cluster.pipelines.rules import check_pipeline
from phalanx.cluster.pipelines.size import HERE, PipelineLimits
from phalanx.cluster.pipelines.step_order import (
    MOST_ORDER_BYTES,
    MOST_RECORD_BYTES,
    RecordedRun,
    StepOrder,
    StepReport,
    encode_order,
    encode_record,
    step_order,
)
from phalanx.cluster.protocol.commands import Accept, Refuse
from phalanx.cluster.protocol.events import AnswerPipeline, CancelPipeline, SubmitPipeline
from phalanx.cluster.reasons import Reason, reason
from phalanx.cluster.state import ClusterPipeline, TaskJob
from phalanx.config import ConfigError

ORDER_PLACE, KEY_PLACE = "@phalanx-order@", "@phalanx-key@"
# Of a run: all its tasks are in one submission, and what they wait for is looked at in one event.
LIMITS = PipelineLimits(tasks=500, waits=25_000)
MOST_RUNS = 200  # of a user, that have not ended
ENDED_RUNS = 200  # that are remembered
_decode_report = msgspec.json.Decoder(StepReport).decode


def input_place(name: str) -> str:
    """The placeholder for an input's path in a job's payload."""
    return f"@phalanx-input:{name}@"


# Orders of people.


def submit(ctx: Context, fact: SubmitPipeline) -> None:
    """Accept a run, or refuse it with a reason."""
    try:
        machine = machine_of(fact.pipeline, LIMITS)
    except ConfigError as error:
        _refuse(ctx, fact.request, reason("bad_pipeline", problem=str(error)))
        return
    why = _refusal(ctx, fact, machine)
    if why is not None:
        _refuse(ctx, fact.request, why)
        return
    run = ClusterPipeline(
        id=ctx.next_pipeline,
        user=fact.user,
        team=fact.team,
        folder=fact.folder,
        work=fact.work,
        ranks=fact.ranks,
        manifest=fact.manifest,
        results=dict(fact.results),
        began_ns=ctx.now_ns,
    )
    ctx.next_pipeline += 1
    ctx.view.pipelines[run.id] = run
    ctx.machines[run.id] = machine
    told = reason("pipeline_accepted", pipeline=run.id)
    ctx.emit((), Accept(reason=told, request=fact.request))
    began = RunBegan(
        ctx.now_ns, fact.pipeline, fact.inputs, fact.version, fact.parallel, queued=True
    )
    _feed(ctx, run, began)


def _refusal(ctx: Context, fact: SubmitPipeline, machine: PipelineMachine) -> Reason | None:
    live = [run for run in ctx.view.pipelines.values() if not run.ended_ns]
    if sum(run.user == fact.user for run in live) >= MOST_RUNS:
        return reason("too_many_pipelines", user=fact.user, most=MOST_RUNS)
    for other in live:
        if (other.folder, other.team) == (fact.folder, fact.team):
            return reason("pipeline_runs", pipeline=other.id, folder=fact.folder)
    texts = [text for each in machine.tasks.values() for text in each.task.step.outputs.values()]
    for text in (fact.folder, *texts):
        if not text.isprintable() or '"' in text or "\\" in text:  # it becomes part of a payload
            return reason("pipeline_path", path=ascii(text))
    for progress in machine.tasks.values():
        for pattern in progress.task.raw_patterns:
            if pattern not in fact.inputs:
                return reason("pipeline_incomplete", what=f"the hash of {pattern}")
    last = () if fact.manifest is None else (fact.manifest,)
    for spec in (*fact.ranks.values(), *fact.work.values(), *last):
        if (why := refusal(ctx, spec)) is not None:
            return why
    return None


def answer(ctx: Context, fact: AnswerPipeline) -> None:
    """Apply a person's answer to a step's question."""
    run = _live(ctx, fact.pipeline, fact.request)
    if run is None:
        return
    progress = ctx.machines[run.id].tasks.get(fact.task)
    if progress is None or progress.state is not TaskState.ASKING:
        _refuse(ctx, fact.request, reason("nothing_asked", pipeline=run.id, task=fact.task))
        return
    _accept(ctx, fact.request)
    _feed(ctx, run, TaskAnswered(ctx.now_ns, fact.task, fact.approved, fact.by, fact.why))


def cancel(ctx: Context, fact: CancelPipeline) -> None:
    """Cancel a run; completed steps stay completed."""
    run = _live(ctx, fact.pipeline, fact.request)
    if run is not None:
        _accept(ctx, fact.request)
        _feed(ctx, run, RunCancelled(ctx.now_ns, fact.by, fact.why))


def _live(ctx: Context, number: int, request: str) -> ClusterPipeline | None:
    run = ctx.view.pipelines.get(number)
    if run is None:
        _refuse(ctx, request, reason("no_such_pipeline", pipeline=number))
    elif run.ended_ns:
        state = ctx.machines[number].state
        _refuse(ctx, request, reason("pipeline_ended", pipeline=number, state=state))
        return None
    return run


def _accept(ctx: Context, request: str) -> None:
    ctx.emit((), Accept(reason=reason("accepted"), request=request))


def _refuse(ctx: Context, request: str, why: Reason) -> None:
    ctx.emit((), Refuse(reason=why, request=request))


# What happens to a run.


def follow_jobs(ctx: Context) -> None:
    """Inform runs of their jobs that began or ended with the current event."""
    while ctx.changed_steps:
        number = next(iter(ctx.changed_steps))
        del ctx.changed_steps[number]
        run_number, task = ctx.step_jobs[number]
        run, job = ctx.view.pipelines[run_number], ctx.view.jobs.get(number)
        if job is not None and not job.ended:
            _feed(ctx, run, AttemptBegan(ctx.now_ns, task))
            continue
        del ctx.step_jobs[number]
        task_job = run.under_way.pop(task)
        if job is None:  # the site remembers no job that has ended
            gone = f"job {number} has ended, and its record has expired"
            _feed(ctx, run, TaskFailed(ctx.now_ns, task, gone))
        elif task_job.ranks and job.state is JobState.DONE:
            progress = ctx.machines[run.id].tasks[task]
            if progress.state is TaskState.RUNNING:
                problem = _start_job(ctx, run, _order(ctx, run, task), ranks=False)
                if problem:
                    _feed(ctx, run, TaskFailed(ctx.now_ns, task, problem))
        else:
            _feed(ctx, run, _end(ctx, ctx.machines[run.id].tasks[task], job, task_job))


def _end(ctx: Context, progress: TaskProgress, job: ClusterJob, task_job: TaskJob) -> AnyEvent:
    """The outcome of a task, from the report that its job left."""
    task, now_ns = progress.task.name, ctx.now_ns
    if job.state is not JobState.DONE:
        last = job.why.facts.get("evidence") or job.why  # the attempts are counted here
        return TaskFailed(now_ns, task, f"job {job.id} {job.state}: {last}")
    try:
        report = _decode_report(job.result or b"{}")
    except msgspec.MsgspecError as error:
        return TaskFailed(now_ns, task, f"job {job.id} left a result that cannot be read: {error}")
    if task_job.release and report.release is not None:
        return structs.replace(report.release, time_ns=now_ns, task=task)
    if not task_job.release and report.result is not None:
        if wrong := _wrong(progress.task, progress.key, report.result):
            return TaskFailed(now_ns, task, f"job {job.id} left a result that {wrong}")
        return TaskFinished(now_ns, task, report.result)
    return TaskFailed(now_ns, task, f"job {job.id} succeeded, but left no result")


def _wrong(task: Task, key: str, result: TaskResult) -> str:
    """Why a reported result is invalid (other tasks rely on it); "" if it is valid."""
    expected = {name: f"store/{key}/{text}" for name, text in task.step.outputs.items()}
    if {name: each.path for name, each in result.outputs.items()} != expected:
        return "does not name the step's outputs"
    if any(name not in result.scores for name in task.step.scores):
        return "lacks scores of the step"
    return ""


def time_passed(ctx: Context, number: int, asked_ns: int) -> None:
    """Wake a run at the time that it asked for."""
    run = ctx.view.pipelines.get(number)
    if run is not None and not run.ended_ns and run.wake_ns == asked_ns:
        run.wake_ns = 0
        _feed(ctx, run, TimePassed(ctx.now_ns))


def _feed(ctx: Context, run: ClusterPipeline, event: AnyEvent) -> None:
    """Apply an event and everything that follows from it at once."""
    machine, waiting = ctx.machines[run.id], deque([event])
    while waiting:
        happened = waiting.popleft()
        run.events.append(happened)
        if isinstance(happened, TaskFinished):
            run.results[machine.tasks[happened.task].key] = happened.result
        for action in machine.handle(happened):
            match action:
                case LookUp(task=task, key=key):
                    waiting.append(LookedUp(ctx.now_ns, task, _looked_up(ctx, run, task, key)))
                case ReadRelease(task=task, model=model):
                    order = structs.replace(_order(ctx, run, task), release_of=model)
                    waiting.extend(_failed(ctx, task, _start_job(ctx, run, order, ranks=False)))
                case StartTask(task=task):
                    problem = _start_job(ctx, run, _order(ctx, run, task), ranks=True)
                    waiting.extend(_failed(ctx, task, problem))
                case StopTask(task=task):
                    if task in run.under_way:
                        end_job(ctx, ctx.view.jobs[run.under_way[task].job])
                case KeepResult(key=key):
                    run.approved[key] = None
    _wake_or_end(ctx, run, machine)


def _failed(ctx: Context, task: str, problem: str) -> list[AnyEvent]:
    return [TaskFailed(ctx.now_ns, task, problem)] if problem else []


def _looked_up(ctx: Context, run: ClusterPipeline, task: str, key: str) -> TaskResult | None:
    """The result of a key; answers are also taken from earlier runs in the folder."""
    of_task = ctx.machines[run.id].tasks[task].task
    if of_task.step.kind != "approval":
        found = run.results.get(key)
        return found if found is not None and not _wrong(of_task, key, found) else None
    others = (
        TaskResult()
        for other in ctx.view.pipelines.values()
        if (other.folder, other.team) == (run.folder, run.team) and key in other.approved
    )
    return next(others, None)


def _wake_or_end(ctx: Context, run: ClusterPipeline, machine: PipelineMachine) -> None:
    if machine.state not in ("running", "asking"):
        if run.ended_ns:
            return  # a job that was told to end has done so
        run.ended_ns, run.wake_ns = ctx.now_ns, 0
        outcome = reason(
            "pipeline_is", pipeline=run.id, name=machine.pipeline.name, state=machine.state
        )
        job = max(run.newest_jobs.values(), default=0)
        if job:  # those who may see its jobs are told
            ctx.notify(outcome, job=job, level="info" if machine.state == "done" else "warning")
        _start_manifest(ctx, run)
        _forget_oldest(ctx)
        return
    due_ns = machine.next_time_ns()
    if due_ns is not None and due_ns != run.wake_ns:
        run.wake_ns = max(due_ns, ctx.now_ns)
        ctx.wake(run.wake_ns, "pipeline", run.id, run.wake_ns)


def _forget_oldest(ctx: Context) -> None:
    ended = [run for run in ctx.view.pipelines.values() if run.ended_ns and not run.under_way]
    for run in sorted(ended, key=lambda each: (each.ended_ns, each.id))[:-ENDED_RUNS]:
        del ctx.view.pipelines[run.id], ctx.machines[run.id]


# Jobs.


def _order(ctx: Context, run: ClusterPipeline, task: str) -> StepOrder:
    return step_order(ctx.machines[run.id], task, run.folder, run.run_folder)


def _start_job(ctx: Context, run: ClusterPipeline, order: StepOrder, *, ranks: bool) -> str:
    """Submit a task's next job; return the error, if any."""
    first = run.ranks.get(order.task) if ranks else None
    spec = first or run.work.get(order.task)
    if spec is None:
        return "the submission has no job for it"
    word = encode_order(order)
    if len(word) > MOST_ORDER_BYTES:
        return f"its list of inputs takes {len(word)} bytes, and {MOST_ORDER_BYTES} is the most"
    filled = structs.replace(spec, payload=_filled(spec, order, word))
    if (why := refusal(ctx, filled)) is not None:
        return str(why)
    number = create(ctx, filled)
    run.under_way[order.task] = TaskJob(number, spec is first, bool(order.release_of))
    run.newest_jobs[order.task] = number
    ctx.step_jobs[number] = (run.id, order.task)
    return ""


def _start_manifest(ctx: Context, run: ClusterPipeline) -> None:
    """Submit the job that writes the manifest; without one, the client writes it."""
    encoded = encode_record(RecordedRun(run.folder, run.run_folder, run.events))
    if run.manifest is None or sum(map(len, encoded)) > MOST_RECORD_BYTES:
        return
    payload = run.manifest.payload.replace(ORDER_PLACE, '","'.join(encoded))  # words of a list
    filled = structs.replace(run.manifest, payload=payload)
    if refusal(ctx, filled) is None:
        create(ctx, filled)


def _filled(spec: JobSpec, order: StepOrder, word: str) -> str:
    payload = spec.payload.replace(ORDER_PLACE, word).replace(KEY_PLACE, order.key)
    for name, sources in order.inputs.items():
        # Not of raw files: their names hold anything, and whoever asked has put them in.
        paths = (f"{order.folder}/{each.path}" for each in sources if not each.raw)
        payload = payload.replace(input_place(name), next(iter(paths), ""))
    return payload


# From a snapshot.


def machine_of(table: dict[str, Any], limits: PipelineLimits = HERE) -> PipelineMachine:
    """The machine of a pipeline's table; ConfigError if it is invalid, or too large."""
    pipeline = pipeline_from_table(table)
    return PipelineMachine(pipeline, check_pipeline(pipeline, lambda pattern: True, limits))


def rebuild(ctx: Context) -> None:
    """Rebuild machines and the map from jobs to runs after loading a snapshot."""
    for run in ctx.view.pipelines.values():
        began = run.events[0]
        assert isinstance(began, RunBegan)
        machine = ctx.machines[run.id] = machine_of(began.pipeline)
        for event in run.events:
            machine.handle(event)
        for task, known in run.under_way.items():
            ctx.step_jobs[known.job] = (run.id, task)
