"""``phalanx submit --wait``: looks at a job until it has ended."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

import typer

from phalanx.cli.connection import connected
from phalanx.cli.output import print_json
from phalanx.cli.tables import plain
from phalanx.cluster.jobs.job import JobState
from phalanx.control.client.client import Client, ClientError
from phalanx.control.wire.api_types import JobDetail, JobOut

WAIT_SECONDS = 0.5  # between two looks at a job
AWAY_SECONDS = 300.0  # that a server may be away meanwhile
TIMED_OUT = 124  # exit code, as timeout(1) says it


def ended_well(number: int, server: str, state: Path | None, json: bool, timeout: float) -> bool:
    """Wait for a job, also past restarts of its server; whether it is done."""
    until = time.monotonic() + timeout if timeout else math.inf
    with connected(server, json, state) as client:
        try:
            while not (job := _look(client, number)).ended_ns:
                if time.monotonic() > until:
                    print(f"job {number} is {job.state} and goes on", file=sys.stderr)
                    raise typer.Exit(TIMED_OUT)
                time.sleep(WAIT_SECONDS)
        except KeyboardInterrupt:
            print(f"job {number} goes on; `phalanx cancel {number}` ends it", file=sys.stderr)
            raise typer.Exit(130) from None
    if json:
        print_json(job)
    else:
        print(plain(f"job {number} is {job.state}: {job.why.text}"), file=sys.stderr)
    return job.state == JobState.DONE


def _look(client: Client, number: int) -> JobOut:
    """The job as it is now; a server that is away for a while is waited for."""
    until = time.monotonic() + AWAY_SECONDS
    while True:
        try:
            return client.get(f"/v1/jobs/{number}", JobDetail).job
        except ClientError as error:
            if error.status or time.monotonic() > until:
                raise
        time.sleep(WAIT_SECONDS)
