"""What a program leaves as its result: the text of a file that its first rank may write."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from phalanx.cluster.pipelines.step_order import RESULT_VARIABLE
from phalanx.cluster.protocol.message_rights import MOST_TEXT
from phalanx.control.agent.jobs.local_job import LocalJob, WorkerProcess
from phalanx.control.agent.safe_files import open_regular
from phalanx.control.wire.payload import Script

log = logging.getLogger("phalanx.agent")


def result_variable(job: LocalJob) -> dict[str, str]:
    """Where a program may leave a result."""
    return {RESULT_VARIABLE: str(_path(job, job.generation))}


def left_result(job: LocalJob, process: WorkerProcess) -> str:
    """What a program that ended well has left; "": nothing, or nothing that can be kept."""
    if not isinstance(job.work, Script) or process.index != 0:
        return ""
    path = _path(job, process.generation)
    try:
        file = open_regular(path, owner=job.owner.uid if job.owner is not None else None)
    except FileNotFoundError:
        return ""
    except OSError as error:
        log.warning("job %d: its result cannot be read: %s", job.number, error)
        return ""
    with os.fdopen(file, "rb") as opened:
        data = opened.read(MOST_TEXT + 1)
    text = data.decode(errors="replace")
    if len(data) > MOST_TEXT:
        log.warning("job %d: its result has more than %d bytes", job.number, MOST_TEXT)
        return ""
    return text


def _path(job: LocalJob, generation: int) -> Path:
    return job.own_folder / f"result-{generation}"
