"""Profiles of jobs that really run, from a process forked for each."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from phalanx.config import Job
from phalanx.observe.profile.profile import JobProfile, read_profile, write_profile
from phalanx.observe.profile.run import profile_job
from phalanx.train.callback import Callback, TrainingRun
from phalanx.train.profile.recorder import ProfileRecorder
from phalanx.train.rank.launch import redirect_output

PATIENCE = 100.0  # seconds


def profiled(
    job: Job,
    ranks: int,
    out: Path,
    recorder: ProfileRecorder,
    callbacks: Sequence[Callback] = (),
) -> JobProfile:
    """A resolved job's profile; what the launcher printed where it fails."""
    out.mkdir(parents=True)
    log = out / "launcher.txt"
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            redirect_output(log)
            write_profile(profile_job(job, ranks, out, recorder, callbacks=callbacks), out)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    deadline = time.monotonic() + PATIENCE
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            raise AssertionError(f"no profile within {PATIENCE} s:\n{log.read_text()}")
        time.sleep(0.02)
    assert os.waitstatus_to_exitcode(ended[1]) == 0, log.read_text()
    return read_profile(out)


class SlowCorpus(Callback):
    """A corpus on a storage that takes its time for each step; synthetic tokens do not."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def begin(self, run: TrainingRun) -> None:
        if run.job.data.source != "shards":
            return
        reader, seconds = run.trainer.feed.reader, self._seconds
        read = reader.read

        def slowly(*given: object) -> object:
            time.sleep(seconds)
            return read(*given)  # type: ignore[arg-type]

        reader.read = slowly  # type: ignore[method-assign, assignment]
