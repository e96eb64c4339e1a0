"""The program of a step that runs as a job: carries out its order file, writes its result file.

python -m phalanx.pipelines.cluster.step_job [ranks|take-over] ORDER
python -m phalanx.pipelines.cluster.step_job manifest RECORD…

``ranks``: one rank of a step that has several, which only works; ``take-over``: what they made
becomes the step's result; ``manifest``: a run has ended, and what it did is written down.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import FrameType

import msgspec

from phalanx.cluster.pipelines.step_order import (
    RESULT_VARIABLE,
    StepOrder,
    StepReport,
    decode_order,
    decode_record,
)
from phalanx.control.host.parent_death import follow
from phalanx.control.trust.secrets import REFERENCE
from phalanx.data.durable_files import write_atomically
from phalanx.pipelines.registry.models import RegistryError
from phalanx.pipelines.run.commands import StepCommand
from phalanx.pipelines.run.content import ContentCache
from phalanx.pipelines.run.manifest import write_served_manifest
from phalanx.pipelines.run.step_work import DONE_AT_ONCE, StepWork, read_release
from phalanx.pipelines.run.workspace import UnfinishedOutput, Workspace

RANKS, TAKE_OVER, MANIFEST = "ranks", "take-over", "manifest"
FAILED = 1


class StepFailed(Exception):  # noqa: N818 - what a step did, no fault of ours
    """A step failed; the message says why."""

    def __init__(self, why: str, code: int = FAILED) -> None:
        super().__init__(why)
        self.code = code


def main(arguments: list[str]) -> int:
    """Run a step and return its exit code."""
    if arguments[0] == MANIFEST:
        record = decode_record(arguments[1:])
        write_served_manifest(Workspace(Path(record.folder)), record.run, record.events)
        return 0
    mode, word = arguments if len(arguments) == 2 else ("", *arguments)
    order = decode_order(word)
    if mode == RANKS:
        _become_rank(order)
    try:
        report = _report(order, took_over=mode == TAKE_OVER)
    except StepFailed as error:
        if str(error):
            sys.stderr.write(f"{order.task}: {error}\n")
        return error.code
    where = os.environ.get(RESULT_VARIABLE)
    if where:
        write_atomically(Path(where), msgspec.json.encode(report))
    return 0


def _report(order: StepOrder, *, took_over: bool) -> StepReport:
    try:
        if order.release_of:
            release = read_release(Path(order.registry), order.task, order.release_of)
            return StepReport(release=release)
        return _done(order, took_over=took_over)
    except (RegistryError, UnfinishedOutput) as error:
        raise StepFailed(str(error)) from None


def _done(order: StepOrder, *, took_over: bool) -> StepReport:
    """The step's result: a stored one, or the one that it makes now."""
    workspace = Workspace(Path(order.folder))
    workspace.create()
    work = StepWork(order, workspace, ContentCache(workspace.hashes))
    kind = order.step.kind
    found = workspace.look_up(order.key) if kind != "notify" else None
    if found is not None:  # made by an attempt that could not say so any more
        workspace.link(order.step, found)
        return StepReport(result=found)
    if not took_over:
        work.prepare()
        if kind in DONE_AT_ONCE:
            if problem := work.do_at_once():
                raise StepFailed(problem)
        else:
            _run(work)
    return StepReport(result=work.result())


def _run(work: StepWork) -> None:
    """Run its command to the end; a request to stop is passed on to it."""
    command = work.command()
    try:
        process = subprocess.Popen(
            command.argv,
            stdin=subprocess.DEVNULL,
            env=_environment(command),
            preexec_fn=partial(follow, os.getpid(), signal.SIGKILL),  # we have one thread
        )
    except OSError as error:
        raise StepFailed(f"{command.argv[0]} cannot be started: {error.strerror}") from None

    def stop(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    signal.signal(signal.SIGTERM, stop)
    code = process.wait()
    if code < 0:
        raise StepFailed(f"ended by {signal.Signals(-code).name}", 128 - code)
    if code:
        raise StepFailed("", code)  # what it printed says why


def _become_rank(order: StepOrder) -> None:
    """Replace this process by one rank of the step's command."""
    workspace = Workspace(Path(order.folder))
    workspace.create()
    work = StepWork(order, workspace, ContentCache(workspace.hashes))
    work.prepare(keep=True)  # other ranks may have begun
    command = work.command()
    os.execvpe(command.argv[0], command.argv, _environment(command))


def _environment(command: StepCommand) -> dict[str, str]:
    """Variables of the job, secrets as read on the node, and values known only at run time."""
    own = command.environment.items()
    return {**os.environ, **{name: text for name, text in own if not text.startswith(REFERENCE)}}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
