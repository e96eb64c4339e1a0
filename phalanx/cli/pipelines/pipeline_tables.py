"""Pipelines as people see them: plan, progress, tables, graphs."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Any

from phalanx.cli.tables import add_row, plain, print_table, span, table
from phalanx.cluster.pipelines.events import GOOD, TaskState
from phalanx.cluster.pipelines.graph import Task
from phalanx.cluster.pipelines.machine import PipelineMachine, TaskProgress
from phalanx.cluster.units import HOUR_NS, SECOND_NS
from phalanx.pipelines.run.session import PipelineRun, RunEnd
from phalanx.pipelines.run.workspace import Workspace

PLANNED = {
    TaskState.READY: "runs",
    TaskState.WAITING: "runs",
    TaskState.ASKING: "asks a person",
}


def run_view(machine: PipelineMachine) -> dict[str, Any]:
    """A run as JSON."""
    return {
        "pipeline": machine.pipeline.name,
        "state": machine.state,
        "seconds": round(machine.spent_ns / SECOND_NS, 3),
        "gpu_seconds": round(machine.spent_gpu_ns / SECOND_NS, 3),
        "tasks": {
            name: {
                "state": each.state,
                "reason": each.reason,
                "key": each.key,
                "attempts": each.attempts,
                "seconds": round(each.took_ns / SECOND_NS, 3),
                "outputs": each.result.outputs,
                "scores": each.result.scores,
            }
            for name, each in machine.tasks.items()
        },
    }


def print_plan(machine: PipelineMachine) -> None:
    """What a run would do."""
    made = table("TASK", "KIND", "PLAN", "BECAUSE")
    for name, each in machine.tasks.items():
        add_row(made, name, each.task.step.kind, PLANNED.get(each.state, each.state), _why(each))
    print_table(made)


def _why(progress: TaskProgress) -> str:
    if progress.state is TaskState.WAITING:
        before = [waits.task for waits in progress.task.waits]
        return f"what it waits for runs: {', '.join(before)}"
    if progress.state is TaskState.READY:
        return "it was not done with these inputs and settings"
    return progress.reason


def print_change(progress: TaskProgress) -> None:
    """A line when a task's state changes."""
    name, state = progress.task.name, progress.state
    if state in (TaskState.WAITING, TaskState.LOOKING, TaskState.READY):
        return
    text = f"{time.strftime('%H:%M:%S')}  {name}: {state}"
    if state is TaskState.RUNNING and progress.attempts > 1:
        text += f", attempt {progress.attempts}"
    if state is TaskState.DONE and progress.took_ns:
        text += f" in {span(progress.took_ns / SECOND_NS)}"
    if state is TaskState.ASKING:
        text += f": {progress.task.step.question}"
    if progress.result.scores:
        scores = (f"{metric} {value:.6g}" for metric, value in progress.result.scores.items())
        text += f" ({', '.join(scores)})"
    elif progress.reason and state is not TaskState.CACHED:
        text += f": {progress.reason}"
    print(plain(text), flush=True)


def print_end(end: RunEnd, path: Path, server: str) -> None:
    """The last lines of a run, and what to do next; ``server``: whose run it is, "": our own."""
    states = [each.state for each in end.machine.tasks.values()]
    counts = ", ".join(
        f"{states.count(state)} {state}" for state in TaskState if states.count(state)
    )
    print(f"run {end.number} is {end.state}: {counts}; {_used(end.machine)}")
    if end.manifest is not None:
        print(f"manifest: {end.manifest}")
    where = shlex.quote(str(path)) + (f" --server {server}" if server else "")
    for each in end.machine.tasks.values():
        if each.state is TaskState.ASKING:
            name = shlex.quote(each.task.name)
            print(f"decide: phalanx answer {name} --pipeline {where} --approve (or --reject)")
    if end.state == "asking":
        print(f"then: phalanx pipeline resume {where}")


def print_run(run: PipelineRun, workspace: Workspace) -> None:
    """A run's tasks as a table."""
    machine = run.machine
    print(f"{machine.pipeline.name}, run {run.number}: {machine.state}; {workspace.folder}")
    made = table("TASK", "STATE", "TRIES", "TIME", "SCORES", "WHY")
    for name, each in machine.tasks.items():
        scores = ", ".join(f"{key} {value:.6g}" for key, value in each.result.scores.items())
        took = span(each.took_ns / SECOND_NS) if each.attempts and each.state in GOOD else ""
        add_row(made, name, each.state, each.attempts or "", took, scores, each.reason)
    print_table(made)
    print(f"used: {_used(machine)}")
    logs = workspace.run_folder(run.number) / "logs"
    if logs.is_dir():
        print(f"logs: {logs}")


def _used(machine: PipelineMachine) -> str:
    """Time of all attempts that have ended."""
    text = f"{span(machine.spent_ns / SECOND_NS)} of steps"
    hours = machine.spent_gpu_ns / HOUR_NS
    return f"{text}, {hours:.3g} GPU-hours" if hours else text


def print_graph(tasks: list[Task]) -> None:
    """Each task after those that it waits for."""
    made = table("TASK", "KIND", "AFTER")
    for task in tasks:
        after = (
            waits.task if waits.end == "ok" else f"{waits.task}:{waits.end}" for waits in task.waits
        )
        add_row(made, task.name, task.step.kind, ", ".join(after))
    print_table(made)


def dot_graph(tasks: list[Task]) -> str:
    """The graph as Graphviz reads it."""
    edges = [f'  "{waits.task}" -> "{task.name}";' for task in tasks for waits in task.waits]
    nodes = [f'  "{task.name}";' for task in tasks]
    return "\n".join(["digraph pipeline {", *nodes, *edges, "}"])


def mermaid_graph(tasks: list[Task]) -> str:
    """The graph as Markdown shows it."""
    numbers = {task.name: f"t{number}" for number, task in enumerate(tasks)}
    nodes = [f'  {numbers[task.name]}["{task.name}"]' for task in tasks]
    edges = [
        f"  {numbers[waits.task]} --> {numbers[task.name]}"
        for task in tasks
        for waits in task.waits
    ]
    return "\n".join(["graph LR", *nodes, *edges])
