"""``phalanx sweep``: many trials of one job, the best of which go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from phalanx.cli.connection import connected, exit_on_server_error
from phalanx.cli.options import Json, ServerUrl, State
from phalanx.cli.output import exit_on_config_error, fail, print_json, write_out
from phalanx.cli.parse_errors import FileGroup
from phalanx.cli.tables import plain
from phalanx.cli.train.sweep_tables import (
    describe_cost,
    describe_plan,
    fit_lines,
    print_sweeps,
    print_trials,
    write_csv,
)
from phalanx.config import ConfigError
from phalanx.control.client.client import Client, ClientError
from phalanx.control.client.sweep_cost import sweep_cost
from phalanx.control.client.sweep_driver import cancel_driver, driver_job, driver_of
from phalanx.control.client.sweep_run import (
    SweepError,
    SweepRun,
    SweepStopped,
    cancel_sweep,
    ranked,
    sweep_trials,
    trial_line,
    unfinished,
)
from phalanx.control.wire.api_types import JobsSubmitted, SweepList, TrialOut
from phalanx.plan.sweeps.planned import SweepPlan
from phalanx.plan.sweeps.rules import check_sweep, resolved_trial
from phalanx.plan.sweeps.scaling_law import ScalingFit, fit_scaling_law
from phalanx.plan.sweeps.sizes import scaling_point

STOPPED, SPENT = 130, 4  # exit codes
DECADES = (10, 100, 1000)  # times the largest trial's compute, where no budget is given


class SweepGroup(FileGroup):
    """Every command reads the file of a sweep."""

    takes: ClassVar = {
        ".toml": "`phalanx sweep run FILE` runs its trials, `phalanx sweep plan FILE` shows them",
        "": "a sweep is described in TOML: `phalanx sweep run SWEEP.toml`",
    }


app = typer.Typer(
    cls=SweepGroup,
    no_args_is_help=True,
    help="Try settings of a job: grid, random, Sobol, or successive halving (ASHA).",
)

SweepPath = Annotated[
    Path, typer.Argument(metavar="SWEEP.toml", help="File that describes the sweep.")
]


@contextmanager
def _reported(json: bool) -> Iterator[None]:
    with exit_on_config_error(json), exit_on_server_error(json):
        yield


@app.command()
def plan(path: SweepPath, server: ServerUrl = "", state: State = None, json: Json = False) -> None:
    """Show the planned trials and their cost; submit nothing."""
    with _reported(json):
        planned, cost = check_sweep(path), None
        try:
            client = Client(server, state)
            planned = check_sweep(path, client.node_gpus())
            cost = sweep_cost(client, planned)
        except ClientError as error:
            if error.status or server or _needs_price(planned):
                raise  # without a server there are still the steps
    if json:
        print_json(
            {
                "sweep": planned.key,
                "trials": planned.settings,
                "rungs": planned.shape,
                "steps": planned.total_steps,
                "cost": cost,
            }
        )
        return
    for line in describe_plan(planned) + (describe_cost(cost) if cost is not None else []):
        print(plain(line))


@app.command()
def run(
    path: SweepPath,
    at_once: Annotated[
        int, typer.Option(min=0, help="Most trials queued or running at a time; 0: as in the file.")
    ] = 0,
    yes: Annotated[
        bool,
        typer.Option("--yes", help="Submit without asking, whatever the planned cost of a trial."),
    ] = False,
    detach: Annotated[
        bool,
        typer.Option(
            "--detach", help="Have a job on the server drive the sweep, and return at once."
        ),
    ] = False,
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Run all trials, or continue an interrupted sweep."""
    with _reported(json):
        check_sweep(path)  # what is wrong with the file needs no server to be said
        client = Client(server, state)
        planned = check_sweep(path, client.node_gpus())
        if _needs_price(planned):
            sweep_cost(client, planned)
        if not json:
            for line in describe_plan(planned):
                print(plain(line), flush=True)
        if detach:
            _detach(client, planned, at_once, yes, json)
            return
        better = planned.sweep.better

        def said(trial: TrialOut) -> None:
            if not json:
                print(plain(trial_line(trial, planned.sweep.metric)), flush=True)

        driver = SweepRun(client, planned, at_once=at_once, confirmed=yes, said=said)
        try:
            end = driver.run()
        except SweepError as error:
            fail(error, 1, {"error": {"code": "sweep", "message": str(error)}} if json else None)
        except (SweepStopped, KeyboardInterrupt) as error:
            why = str(error) or "stopped; trials that were submitted go on"
            shown = {"error": {"code": "stopped", "message": why}} if json else None
            fail(f"{why}: `phalanx sweep run {path}` goes on with the rest", STOPPED, shown)
    _print_best(list(ranked(end.trials, better)), planned, json, top=5)
    if end.spent_up:
        fail("the budget is used up before all trials were tried", SPENT)


@app.command()
def show(
    path: SweepPath,
    top: Annotated[int, typer.Option(min=0, help="Number of best trials to show; 0: all.")] = 20,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print as comma-separated values.")] = False,
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Show the trials so far, the best first."""
    with _reported(json):
        planned = check_sweep(path)
        client = Client(server, state)
        trials = _known_trials(client, planned)
        best_first, driver = (
            list(ranked(trials, planned.sweep.better)),
            driver_of(client, planned.key),
        )
    if as_csv:
        write_csv(best_first, planned.sweep.metric)
        return
    _print_best(best_first, planned, json, top)
    if json:
        return
    if driver is not None:
        print(f"job {driver.id} drives it ({driver.state}): phalanx logs {driver.id}")
    elif unfinished(planned, trials):
        print(
            "it is not at its end, and no job drives it. Where nobody waits for it in a terminal, "
            f"`phalanx sweep run {path} --detach` goes on with the rest"
        )


@app.command()
def cancel(
    path: SweepPath, server: ServerUrl = "", state: State = None, json: Json = False
) -> None:
    """Cancel waiting and running trials; `phalanx sweep run` continues with the rest."""
    with _reported(json):
        planned, client = check_sweep(path), Client(server, state)
        driver = cancel_driver(client, planned.key)
        cancelled = [*([driver] if driver else []), *cancel_sweep(client, planned.key)]
    if json:
        print_json({"sweep": planned.key, "cancelled": cancelled})
    elif cancelled:
        print(f"{planned.key}: {len(cancelled)} jobs are cancelled; what is done stays done")
    else:
        fail(f"{planned.key}: no trial waits or runs")


@app.command("ls")
def list_sweeps(server: ServerUrl = "", state: State = None, json: Json = False) -> None:
    """List the sweeps that a server knows."""
    with connected(server, json, state) as client:
        sweeps = client.get("/v1/sweeps", SweepList).sweeps
    if json:
        print_json(sweeps)
    elif sweeps:
        print_sweeps(sweeps)
    else:
        print("no sweep is known here: phalanx sweep run SWEEP.toml begins one")


@app.command()
def fit(
    path: SweepPath,
    flops: Annotated[
        list[float] | None,
        typer.Option(help="Compute budget to choose a model for, in FLOPs (repeatable)."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Markdown file to write the report to.")] = None,
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Fit loss against model size, tokens and compute; choose a model for a budget."""
    with _reported(json):
        planned = check_sweep(path)
        fits = _fitted(planned, _known_trials(Client(server, state), planned), flops or [])
    lines = fit_lines(fits, planned)
    if out is not None:
        write_out(out, "\n".join([*lines, ""]).encode())
    if json:
        print_json(fits)
    else:
        print("\n".join(map(plain, lines)))


def _detach(client: Client, planned: SweepPlan, at_once: int, yes: bool, json: bool) -> None:
    """Have a job drive it, unless one does."""
    known = driver_of(client, planned.key)
    if known is not None:
        number, became = known.id, "drives it already"
    else:
        made = driver_job(client, planned, at_once=at_once, confirmed=yes)
        number, became = client.post("/v1/jobs", made, JobsSubmitted).jobs[0], "drives it"
    if json:
        print_json({"sweep": planned.key, "driver": number})
    else:
        print(f"job {number} {became}; look: phalanx sweep show, phalanx logs -f {number}")


def _fitted(planned: SweepPlan, trials: list[TrialOut], budgets: list[float]) -> ScalingFit:
    if planned.sweep.better != "lower":
        rule = "a scaling law is one of losses"
        raise ConfigError("better", planned.sweep.better, rule, "sweep over a loss")
    if any(each <= 0 for each in budgets):
        raise ConfigError("--flops", min(budgets), "is no compute", "e.g. 1e20")
    last = len(planned.shape.steps) - 1 if planned.shape is not None else 0
    points = [
        scaling_point(resolved_trial(planned, each.trial), each.value)
        for each in trials
        if each.value is not None and each.rung == last
    ]
    largest = max((each.flops for each in points), default=1.0)
    return fit_scaling_law(points, budgets or [largest * times for times in DECADES])


def _known_trials(client: Client, planned: SweepPlan) -> list[TrialOut]:
    """Jobs of the sweep; ConfigError where the server has none."""
    found = sweep_trials(client, planned.key)
    if found:
        return found
    others = [
        each.sweep
        for each in client.get("/v1/sweeps", SweepList).sweeps
        if each.sweep.rpartition(".")[0] == planned.sweep.name
    ]
    rule = "no trial of it was submitted to this server"
    if others:
        rule += f"; of another file or an older state of this one there is {', '.join(others)}"
    raise ConfigError("sweep", planned.key, rule, "phalanx sweep run begins it")


def _print_best(trials: list[TrialOut], planned: SweepPlan, json: bool, top: int) -> None:
    shown = trials[: top or None]
    if json:
        print_json({"sweep": planned.key, "metric": planned.sweep.metric, "trials": shown})
    else:
        print_trials(shown, planned, len(trials))


def _needs_price(planned: SweepPlan) -> bool:
    return planned.sweep.budget.gpu_hours is not None or planned.sweep.budget.dollars is not None
