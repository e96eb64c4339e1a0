"""Steps as jobs of a server: a job is found again by its name, so that none is submitted twice.

The pipeline's folder must be one that this machine and the nodes share.
"""

from __future__ import annotations

import time
from pathlib import Path

from phalanx.cluster.jobs.job import ENDED, JobState
from phalanx.config import ConfigError, check, default_world_size, load_job, resolve
from phalanx.control.client.client import Client, ClientError
from phalanx.control.server.http.submission import RequestedWork, submission
from phalanx.control.wire.api_types import Done, JobDetail, JobList, JobsSubmitted, Status
from phalanx.pipelines.run.attempts import Attempt, EndedAttempt, TaskOrder

LOOK_SECONDS = 0.5  # between two looks at a job
AWAY_SECONDS = 300.0  # that a server may be away meanwhile
MOST_LISTED = 1000


class JobAttempt:
    """An attempt of a task that is a job; it goes on without whoever drives the run."""

    def __init__(self, client: Client, number: int) -> None:
        self._client, self.number = client, number
        self._look_at, self._heard = 0.0, time.monotonic()

    def poll(self) -> str | None:
        """None: it runs, or nobody can say; "": it is done; otherwise what became of it."""
        now = time.monotonic()
        if now < self._look_at:
            return None
        self._look_at = now + LOOK_SECONDS
        try:
            job = self._client.get(f"/v1/jobs/{self.number}", JobDetail).job
        except ClientError as error:
            if error.status == 0 and now - self._heard < AWAY_SECONDS:
                return None
            return f"job {self.number}: {error}"
        self._heard = now
        if job.state not in ENDED:
            return None
        return (
            "" if job.state is JobState.DONE else f"job {self.number} {job.state}: {job.why.text}"
        )

    def stop(self) -> None:
        """Cancel the job."""
        self._client.post(f"/v1/jobs/{self.number}/cancel", None, Done)

    def leave(self) -> None:
        """The job goes on, and is found again when the run is resumed."""


class ServerExecutor:
    """Submits steps to a server."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._node_gpus = client.get("/v1/status", Status).node_gpus

    def adopt(self, name: str, since: float, work: Path) -> Attempt | None:
        """The newest job of this name that still runs, or that was submitted since a time."""
        chosen, after = 0, 0
        while True:
            found = self._client.get(
                "/v1/jobs", JobList, state="all", after=after, limit=MOST_LISTED
            )
            for job in found.jobs:
                of_this_run = job.submitted_ns >= since * 1e9
                if job.name == name and (of_this_run or job.state not in ENDED):
                    chosen = job.id
            if not found.next_after:
                return JobAttempt(self._client, chosen) if chosen else None
            after = found.next_after

    def start(self, order: TaskOrder) -> Attempt:
        """Submit one; what the server refuses has failed."""
        try:
            made = submission(self._work(order), self._node_gpus)
            done = self._client.post("/v1/jobs", made, JobsSubmitted)
        except (ClientError, ConfigError) as error:
            return EndedAttempt(str(error))
        return JobAttempt(self._client, done.jobs[0])

    def _work(self, order: TaskOrder) -> RequestedWork:
        step, here = order.task.step, str(Path.cwd())
        if not step.job:
            return RequestedWork(
                argv=tuple(order.command.argv),
                ranks=max(1, step.gpus),
                folder=here,
                name=order.name,
                retries=0,  # the pipeline counts them
                minutes=step.timeout_minutes,
                environment=order.command.environment,
            )
        job = load_job(step.job, order.command.overrides)
        ranks = step.gpus or default_world_size(job, self._node_gpus)
        check(job, ranks)
        return RequestedWork(
            job=resolve(job, ranks),
            ranks=ranks,
            folder=here,
            name=order.name,
            retries=0,
            minutes=step.timeout_minutes,
            environment=order.command.environment,
        )
