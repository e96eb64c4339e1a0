"""``phalanx chaos``: inject faults into a job, alone or where it runs, and see what is lost."""

from __future__ import annotations

import logging
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec import structs

from phalanx.cli.completion import job_numbers
from phalanx.cli.connection import connected
from phalanx.cli.job_file import load
from phalanx.cli.option_struct import takes_options
from phalanx.cli.options import Json, ServerUrl, Set, State, WorldSize
from phalanx.cli.output import exit_on, exit_on_config_error, print_json
from phalanx.cli.tables import counted

if TYPE_CHECKING:
    from phalanx.config import Job
    from phalanx.control.client.client import Client
    from phalanx.testing.chaos import ChaosOutcome, ChaosPlan
    from phalanx.testing.chaos.live import LiveOutcome

app = typer.Typer()

LOST, REFUSED = 1, 2  # exit codes
LIVE_STEPS = 60  # of a running job, over which a random plan is spread


@dataclass(frozen=True, kw_only=True)
class ChaosOptions:
    """What ``phalanx chaos`` is asked for."""

    what: Annotated[
        str,
        typer.Argument(
            metavar="JOB.toml|JOB",
            help="A job file, or the number of a running job.",
            autocompletion=job_numbers,
        ),
    ]
    plan: Annotated[
        str,
        typer.Option(
            metavar="FILE|random",
            help="File of faults to inject, or `random` (drawn from the seed).",
        ),
    ] = "random"
    seed: Annotated[int, typer.Option(min=0, help="Seed of a random plan.")] = 0
    count: Annotated[
        int, typer.Option(min=1, help="Random plans in a row, with seeds from there on.")
    ] = 1
    spares: Annotated[int, typer.Option(min=0, help="Number of spare nodes.")] = 1
    namespaces: Annotated[
        bool,
        typer.Option("--namespaces", help="Give each node its own network namespace (needs root)."),
    ] = False
    keep: Annotated[Path | None, typer.Option(help="Keep logs and runs in this folder.")] = None
    overrides: Set = None
    world_size: WorldSize = None

    def load_job(self) -> tuple[Job, int]:
        """The job of the file, checked and resolved, and its ranks."""
        from phalanx.config import check, resolve

        job, ranks = load(Path(self.what), self.overrides, self.world_size)
        check(job, ranks)
        return resolve(job, ranks), ranks

    def plans(self, job: Job, ranks: int) -> list[ChaosPlan]:
        """The plan of a file, or those that are drawn from seeds."""
        from phalanx.testing.chaos import also_drawn, random_plan, read_plan

        steps = job.train.steps
        if self.plan != "random":
            return [read_plan(Path(self.plan), ranks, steps)]
        also = also_drawn(job, namespaces=self.namespaces)
        return [random_plan(self.seed + turn, ranks, steps, also) for turn in range(self.count)]


@app.command()
@takes_options
def chaos(
    options: ChaosOptions, server: ServerUrl = "", state: State = None, json: Json = False
) -> None:
    """Run a job twice: undisturbed, and on a cluster of this machine with the faults of a plan.

    The verdict: whether losses and weights are the same bit for bit, and whether processes,
    shared memory or ports stayed behind. Exit code 0: nothing is lost; 1: something is.

    With the number of a job that runs, faults are injected into that one, on the nodes that are
    processes of this machine. Steps of the plan then count from the step it is at.
    """
    if options.what.isdigit():
        with connected(server, json, state) as client:
            _try_live(client, int(options.what), options.plan, options.seed, state, json)
    else:
        _try_on_own_cluster(options, json)


def _try_on_own_cluster(options: ChaosOptions, json: bool) -> None:
    """Run the job of a file undisturbed, then under each plan, and judge."""
    from phalanx.testing.chaos import ChaosCluster
    from phalanx.testing.chaos.run import play_all

    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    with exit_on_config_error(json):
        job, ranks = options.load_job()
        plans = options.plans(job, ranks)

    def say(text: str) -> None:
        if not json:
            print(text, flush=True)

    spares, namespaces = options.spares, options.namespaces
    folder = tempfile.TemporaryDirectory(prefix="phalanx-chaos-", ignore_cleanup_errors=True)
    with _ended_in_order(), folder as own:
        root = Path(options.keep or own).absolute()
        root.mkdir(parents=True, exist_ok=True)
        cluster = ChaosCluster(root, job, ranks, spares=spares, plans=plans, namespaces=namespaces)
        say(f"== {Path(options.what).name} in peace, on {ranks} ranks")
        with cluster:
            say(f"== and on {ranks} nodes with {spares} spare, under {counted(len(plans), 'plan')}")
            outcomes = play_all(cluster, plans, say)
    if json:
        print_json(verdict(outcomes, cluster.leaks))
    else:
        _conclude(outcomes, cluster.leaks)
    if cluster.leaks or not all(outcome.good for outcome in outcomes):
        raise typer.Exit(LOST)


def verdict(outcomes: list[ChaosOutcome], leaks: list[str]) -> dict[str, object]:
    """What ``--json`` prints."""
    told = [structs.asdict(outcome) | {"good": outcome.good} for outcome in outcomes]
    good = all(outcome.good for outcome in outcomes) and not leaks
    return {"good": good, "outcomes": told, "leaks": leaks}


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """Inside, a stop signal ends the cluster and removes its folder, as Ctrl-C does."""

    def end(number: int, frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)  # it ends already
        raise SystemExit(128 + number)

    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    for each in before:
        signal.signal(each, end)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _try_live(
    client: Client, number: int, plan: str, seed: int, state: Path | None, json: bool
) -> None:
    from phalanx.control.client.client import default_state
    from phalanx.testing.chaos.live import LiveError, LiveTarget, from_here, play_live

    ground = LiveTarget(client, state or default_state())
    job = ground.job(number)
    left = int(job["steps"]) - int(job["step"]) if job["steps"] else LIVE_STEPS
    with exit_on_config_error(json):
        chosen = from_here(_live_plan(plan, seed, max(1, len(job["nodes"])), left), left)
    with exit_on(LiveError, code=REFUSED):
        outcome = play_live(ground, number, chosen, (lambda _: None) if json else print)
    if json:
        print_json({"good": outcome.good, "outcome": outcome})
    else:
        _conclude_live(outcome)
    if not outcome.good:
        raise typer.Exit(LOST)


def _live_plan(plan: str, seed: int, slots: int, steps_left: int) -> ChaosPlan:
    from phalanx.testing.chaos import random_plan, read_plan

    steps = max(2, min(LIVE_STEPS, steps_left))
    if plan == "random":
        return random_plan(seed, slots, steps)
    return read_plan(Path(plan), slots, max(2, steps_left))


def _conclude_live(outcome: LiveOutcome) -> None:
    print("\n== Verdict")
    print(f"the job:                  {outcome.state}, generation {outcome.generations}")
    print(f"faults it recovered from: {len(outcome.recovered_seconds)} of {len(outcome.done)}")
    print(f"slowest recovery:         {max(outcome.recovered_seconds, default=0.0):g} s")
    same = "; ".join(outcome.differences[:3]) or "all gave the same loss"
    print(f"steps made again:         {outcome.made_again}" + (f", {same}" if same else ""))


def _conclude(outcomes: list[ChaosOutcome], leaks: list[str]) -> None:
    lost = [outcome for outcome in outcomes if outcome.state != "done"]
    differing = [outcome for outcome in outcomes if outcome.differences]
    staying = [each for outcome in outcomes for each in outcome.left_over]
    print("\n== Verdict")
    print(f"plans played:                       {len(outcomes)}")
    print(f"jobs lost:                          {len(lost)}")
    print(f"losses and weights identical:       {'no' if differing else 'yes'}")
    print(f"processes that outlived their job:  {len(staying)}")
    print(f"leaked processes, memory or ports:  {len(leaks)}")
    for outcome in differing:
        print(f"{outcome.plan}: {'; '.join(outcome.differences[:3])}")
    for each in (*staying, *leaks):
        print(each)
