"""Whoever drives a sweep as a job of its server: it goes on when the terminal is closed.

python -m phalanx.control.client.sweep_driver ORDER

The job keeps nothing either. Where it or its node is lost, the core starts it again, and it goes on
with the trials that there are.
"""

from __future__ import annotations

import base64
import sys
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from phalanx.config import ConfigError
from phalanx.control.client.client import Client, ClientError
from phalanx.control.client.sweep_run import SweepError, SweepRun, SweepStopped, trial_line
from phalanx.control.server.http.submission import RequestedWork, submission
from phalanx.control.wire.api_types import Done, JobList, JobOut, Submission
from phalanx.plan.sweeps.description import SweepFile
from phalanx.plan.sweeps.planned import SweepPlan
from phalanx.plan.sweeps.rules import plan_trials

DRIVER = (sys.executable, "-m", "phalanx.control.client.sweep_driver")
RETRIES = 20  # of a job that only looks at others
MOST_LISTED = 1000
MOST_ORDER_BYTES = 96 << 10  # as a word of a command line


class SweepOrder(Struct, frozen=True, kw_only=True):
    """A sweep that is to be driven, as its file was when somebody said so."""

    sweep: SweepFile
    base: dict[str, Any]  # the job file's table, with the sweep's settings over it
    at_once: int
    confirmed: bool


def driver_job(client: Client, plan: SweepPlan, *, at_once: int, confirmed: bool) -> Submission:
    """The job that drives a sweep; it reaches the server as whoever submits it does."""
    order = SweepOrder(sweep=plan.sweep, base=plan.base, at_once=at_once, confirmed=confirmed)
    word = base64.urlsafe_b64encode(msgspec.json.encode(order)).decode()
    if len(word) > MOST_ORDER_BYTES:
        rule = f"takes {len(word)} bytes, and {MOST_ORDER_BYTES} is the most of a job"
        raise ConfigError("--detach", plan.key, rule, "leave it out: drive the sweep from here")
    work = RequestedWork(
        argv=(*DRIVER, word),
        folder=str(Path.cwd()),
        name=driver_name(plan.key),
        team=plan.sweep.team,
        retries=RETRIES,
        environment=client.reached_by(),
    )
    return submission(work, 0)


def driver_name(key: str) -> str:
    """The name of the job that drives a sweep."""
    return f"{key}.driver"


def driver_of(client: Client, key: str) -> JobOut | None:
    """The job that drives a sweep now; None: there is none."""
    after, driver = 0, None
    while True:
        page = client.get("/v1/jobs", JobList, after=after, limit=MOST_LISTED, fold=True)
        driver = next((job for job in page.jobs if job.name == driver_name(key)), driver)
        if not page.next_after:
            return driver
        after = page.next_after


def cancel_driver(client: Client, key: str) -> int:
    """End the job that drives a sweep, before its trials; its number, 0: there is none."""
    driver = driver_of(client, key)
    if driver is None:
        return 0
    client.post(f"/v1/jobs/{driver.id}/cancel", None, Done)
    return driver.id


def decode_sweep_order(word: str) -> tuple[SweepOrder, SweepPlan]:
    """The sweep in a word; ValueError where it is none."""
    try:
        text = base64.urlsafe_b64decode(word)
        order = msgspec.json.decode(text, type=SweepOrder)
    except (ValueError, msgspec.MsgspecError) as error:
        raise ValueError(f"{word[:40]!r} is not a sweep: {error}") from None
    return order, plan_trials(order.sweep, order.base)


def main(arguments: list[str]) -> int:
    """Drive a sweep to its end; its exit code, 0 also where somebody or its budget ended it."""
    order, plan = decode_sweep_order(arguments[0])
    metric = plan.sweep.metric
    try:
        run = SweepRun(
            Client(),
            plan,
            at_once=order.at_once,
            confirmed=order.confirmed,
            said=lambda trial: _say(trial_line(trial, metric)),
        )
        end = run.run()
    except SweepStopped as error:
        _say(f"stopped: {error}")
        return 0
    except (SweepError, ClientError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    _say("the budget is used up" if end.spent_up else "every trial has ended")
    return 0


def _say(line: str) -> None:
    """A line of the job's output."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
