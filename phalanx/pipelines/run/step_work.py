"""What doing a step takes, whoever does it: where its inputs lie, whether they still are what they
were, what was made of them, and the kinds that have no process of their own.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from phalanx.cluster.pipelines.events import ReleaseRead, TaskResult
from phalanx.cluster.pipelines.step_order import StepOrder
from phalanx.control.server.webhooks import post
from phalanx.pipelines.registry.models import ModelRegistry, RegistryError
from phalanx.pipelines.run.commands import StepCommand, step_command
from phalanx.pipelines.run.content import ContentCache, pattern_paths
from phalanx.pipelines.run.manifest import MANIFEST_FILE
from phalanx.pipelines.run.registering import register_step
from phalanx.pipelines.run.scores_file import ScoresError
from phalanx.pipelines.run.training import trained
from phalanx.pipelines.run.workspace import UnfinishedOutput, Workspace

DONE_AT_ONCE = ("register", "notify")  # kinds without a process of their own
RESTARTABLE = (("tokenize",), ("prepare",))  # data commands that go on where one was killed


class StepWork:
    """One step of a run in the pipeline's folder."""

    def __init__(self, order: StepOrder, workspace: Workspace, hashes: ContentCache) -> None:
        self.order, self._workspace, self._hashes = order, workspace, hashes
        self.work = workspace.work / order.key

    def prepare(self, *, keep: bool = False) -> None:
        """Make its work folder; only some kinds of steps keep that of a killed attempt."""
        self._workspace.prepare(self.order.key, keep=keep or _goes_on(self.order))
        for text in self.order.step.outputs.values():
            (self.work / text).parent.mkdir(parents=True, exist_ok=True)

    def command(self) -> StepCommand:
        """The command of the step."""
        return step_command(self.order.step, self._input_paths(), self.work)

    def _input_paths(self) -> dict[str, list[str]]:
        folder = self._workspace.folder
        return {
            name: [
                path
                for each in sources
                for path in (pattern_paths(each.path) if each.raw else [str(folder / each.path)])
            ]
            for name, sources in self.order.inputs.items()
        }

    def trained(self) -> bool:
        """Whether a train step has completed all training steps."""
        return trained(self.work, next(iter(self.order.step.outputs.values())))

    def do_at_once(self) -> str:
        """Carry out a step without a process of its own; return the error, if any."""
        return self._register() if self.order.step.kind == "register" else self._notify()

    def result(self) -> TaskResult:
        """Publish its outputs atomically; UnfinishedOutput if something is missing."""
        order = self.order
        if order.step.kind == "train" and not self.trained():
            raise UnfinishedOutput("it ended before its last step")
        if changed := self._changed_input():
            raise UnfinishedOutput(f"{changed} changed while it ran: start a new run")
        result = self._workspace.publish(order.key, order.task, order.step)
        self._workspace.link(order.step, result)
        return result

    def _changed_input(self) -> str:
        """A raw input that has changed since the run began; "" if none has."""
        expected = {
            each.path: each.content
            for sources in self.order.inputs.values()
            for each in sources
            if each.raw
        }
        if self.order.step.job:
            expected[self.order.step.job] = self.order.job_content
        return next(
            (
                pattern
                for pattern, content in expected.items()
                if self._hashes.of_pattern(pattern).content != content
            ),
            "",
        )

    def _register(self) -> str:
        manifest = self._workspace.runs / self.order.run / MANIFEST_FILE
        try:
            register_step(ModelRegistry(Path(self.order.registry)), self.order, manifest)
        except (RegistryError, ScoresError, OSError) as error:
            return str(error)
        return ""

    def _notify(self) -> str:
        order = self.order
        body = {
            "kind": "pipeline",
            "pipeline": order.pipeline,
            "tasks": order.states,
            "scores": order.scores,
        }
        problem = post(order.step.url, msgspec.json.encode(body))
        return f"the receiver {problem}" if problem else ""


def read_release(registry: Path, task: str, model: str) -> ReleaseRead:
    """Scores of a model's current release, if any; RegistryError if the registry is damaged."""
    release = ModelRegistry(registry).released(model) if model else None
    if release is None:
        return ReleaseRead(time.time_ns(), task)
    return ReleaseRead(time.time_ns(), task, release.version, release.scores)


def _goes_on(order: StepOrder) -> bool:
    """Whether an attempt continues in the work folder of a killed one."""
    step = order.step
    return step.kind == "train" or (step.kind == "data" and step.command[:1] in RESTARTABLE)
