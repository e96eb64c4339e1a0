"""``phalanx plan``: the best mapping for a model on a cluster, before anybody pays for it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, ClassVar

import typer
from msgspec import structs

from phalanx.cli.connection import connected
from phalanx.cli.options import Json
from phalanx.cli.output import exit_on_config_error, print_json, refuse_unwritable
from phalanx.cli.parse_errors import FileGroup
from phalanx.cli.plan.request_options import takes_request
from phalanx.cli.progress import working
from phalanx.config import ConfigError
from phalanx.config.errors import plain_reason
from phalanx.control.wire.api_types import FailureRates
from phalanx.hardware import cluster
from phalanx.plan.question.quantities import quantity, short
from phalanx.plan.question.request import PlanRequest, understand


class PlanGroup(FileGroup):
    """Reads a job file as an option, and tables in a command of theirs."""

    takes: ClassVar = {
        ".csv": "`phalanx plan check FILE` compares a table of runs",
        "": "`phalanx plan --model FILE --cluster h100-8` plans a job file",
    }


app = typer.Typer(
    cls=PlanGroup,
    add_completion=False,
    help="Choose a mapping: memory, speed, days, dollars, failures.",
)

Plot = Annotated[
    Path | None,
    typer.Option("--plot", help="Draw waterfall, Pareto front and roofline: .png, .svg, .html."),
]


@app.callback(invoke_without_command=True)
@takes_request
def plan(
    request: PlanRequest,
    ctx: typer.Context,
    plot: Plot = None,
    emit: Annotated[
        Path | None, typer.Option("--emit", help="Write a job file that phalanx train accepts.")
    ] = None,
    json: Json = False,
) -> None:
    """Choose a mapping: memory, speed, days, dollars, failures."""
    if ctx.invoked_subcommand is not None:
        return
    from phalanx.plan.search.proposal import emitted, picture, propose
    from phalanx.plan.show.plot import check_path, draw

    with exit_on_config_error(json):
        request = _completed(request, json)
        if plot is not None:
            check_path(plot)
        with working("search mappings", json):
            proposal = propose(understand(request))
        if emit is not None:
            _write(emit, emitted(proposal, "phalanx " + " ".join(sys.argv[1:])))
        if plot is not None:
            draw(picture(proposal), plot)
    if json:
        print_json(proposal)
        return
    from phalanx.cli.plan.proposal_tables import print_proposal

    print_proposal(proposal)
    for path in (emit, plot):
        if path is not None:
            print(f"wrote {path}")


@app.command()
@takes_request
def explain(
    request: PlanRequest,
    most: Annotated[int, typer.Option("--most", min=1, help="Number of changes to show.")] = 3,
    json: Json = False,
) -> None:
    """Explain where step time goes, what bounds it and what would help most."""
    from phalanx.plan.search.explain import explain_plan
    from phalanx.plan.search.proposal import propose

    with exit_on_config_error(json):
        request = _completed(request, json)
        proposal = propose(understand(request))
        explanation = explain_plan(
            proposal.prediction, proposal.cluster, proposal.constants, proposal.software, most
        )
    if json:
        print_json({"plan": proposal, "explanation": explanation})
        return
    from phalanx.cli.plan.proposal_tables import print_explanation

    print_explanation(proposal, explanation)


@app.command()
@takes_request
def compare(
    request: PlanRequest,
    one: Annotated[str, typer.Argument(help='What differs, e.g. "tp=8" or "cluster=h200-16k".')],
    other: Annotated[str, typer.Argument(help='The other side, e.g. "tp=4,pp=32" or "".')],
    json: Json = False,
) -> None:
    """Compare two plans, each the best under its own constraints."""
    from phalanx.plan.question.request import changed
    from phalanx.plan.search.proposal import propose

    with exit_on_config_error(json):
        sides = []
        for text in (one, other):
            asked = _completed(changed(request, text), json)
            with working("search mappings", json):
                sides.append((text or "as asked", propose(understand(asked))))
    if json:
        print_json(dict(sides))
        return
    from phalanx.cli.plan.proposal_tables import print_comparison

    print_comparison(sides)


@app.command()
@takes_request
def sweep(
    request: PlanRequest,
    gpus: Annotated[
        str, typer.Option("--gpus", help="Counts, e.g. 1k,4k,16k (default: halvings).")
    ] = "",
    plot: Annotated[
        Path | None,
        typer.Option("--plot", help="Draw speed, MFU and price: .png, .svg, .html."),
    ] = None,
    json: Json = False,
) -> None:
    """Compute a scaling curve: the best plan at each number of GPUs."""
    from phalanx.plan.search.sweep import counts_of
    from phalanx.plan.search.sweep import sweep as plans_at
    from phalanx.plan.show.plot import check_path
    from phalanx.plan.show.plot_sweep import draw_sweep

    with exit_on_config_error(json):
        request = _completed(request, json)
        if plot is not None:
            check_path(plot)
        question = understand(request)
        with working("search mappings", json):
            result = plans_at(question, counts_of(gpus, question.cluster))
        if plot is not None:
            draw_sweep(result, plot)
    if json:
        print_json(result)
        return
    from phalanx.cli.plan.proposal_tables import print_sweep

    print_sweep(result.plans, result.failed)
    if plot is not None:
        print(f"wrote {plot}")


@app.command()
def check(
    runs: Annotated[Path, typer.Argument(metavar="FILE.csv", help="Measured runs, one a row.")],
    constants: Annotated[
        Path | None, typer.Option("--constants", help="File made by plan calibrate.")
    ] = None,
    rows: Annotated[bool, typer.Option("--rows", help="Print every row.")] = False,
    unseen: Annotated[
        bool,
        typer.Option(
            "--unseen",
            help="Cross-validate: leave each project out in turn, its software unknown.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Predict every run of a table and compare with what was measured."""
    from phalanx.plan.evidence.check import check_rows
    from phalanx.plan.question.request import load_constants

    with exit_on_config_error(json):
        if unseen:
            _check_unseen(_readable(runs), json)
            return
        chosen = load_constants(constants) if constants is not None else None
        with working("predict runs", json):
            report = check_rows(_readable(runs), chosen)
    if json:
        print_json(report)
        return
    from phalanx.cli.plan.evidence_tables import print_check

    print_check(report, rows)


@app.command()
def calibrate(
    runs: Annotated[
        Path | None, typer.Argument(metavar="[RUNS.csv]", help="Measured runs to fit to.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Time matmul, attention and memory on this GPU.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write the constants, for --constants.")
    ] = None,
    json: Json = False,
) -> None:
    """Fit the efficiency constants to measured runs, or to the machine at hand."""
    with exit_on_config_error(json):
        if (runs is None) != measure:
            rule = "give either RUNS.csv or --measure"
            raise ConfigError("calibrate", str(runs or ""), rule, "e.g. plan calibrate runs.csv")
        if runs is not None:
            _calibrate_to_runs(_readable(runs), out, json)
        else:
            refuse_unwritable(out, "--out")
            _calibrate_to_device(out, json)


@app.command()
def textbook(
    parameters: Annotated[str, typer.Option(help="Parameters of the model.")] = "1T",
    cluster_name: Annotated[str, typer.Option("--cluster", help="E.g. h100-100k.")] = "h100-100k",
    tokens: Annotated[str, typer.Option(help="Tokens to train on.")] = "15T",
    mfu: Annotated[float, typer.Option(help="Fraction of peak FLOP/s that is reached.")] = 0.4,
    tp: Annotated[int, typer.Option("--tp", help="Tensor.")] = 8,
    pp: Annotated[int, typer.Option("--pp", help="Pipeline.")] = 16,
    micro_batches: Annotated[
        int, typer.Option(min=1, help="Micro-batches of a replica in a step.")
    ] = 64,
    batch: Annotated[str, typer.Option(help="Tokens in a step.")] = "4M",
    sequence: Annotated[str, typer.Option(help="Tokens in a sample.")] = "8k",
    node_mtbf_hours: Annotated[
        float, typer.Option(min=1, help="Mean time between failures of one node.")
    ] = 5e4,
    json: Json = False,
) -> None:
    """Show the textbook formulas with their numbers, and where they disagree with the planner."""
    from phalanx.plan.show.textbook import TextbookCase
    from phalanx.plan.show.textbook import textbook as lines_of

    with exit_on_config_error(json):
        on = cluster(cluster_name)
        case = TextbookCase(
            parameters=quantity(parameters, "parameters", 1e6, 1e16),
            tokens=quantity(tokens, "tokens"),
            mfu=mfu,
            tensor=tp,
            pipeline=pp,
            micro_batches=micro_batches,
            batch_tokens=quantity(batch, "batch", binary=True),
            sequence=quantity(sequence, "sequence", binary=True),
            node_mtbf_hours=node_mtbf_hours,
        )
        lines = lines_of(case, on)
    if json:
        print_json(lines)
        return
    from phalanx.cli.plan.evidence_tables import print_textbook

    print_textbook(lines, f"{short(case.parameters)} parameters on {on.gpus:,} {on.gpu.name}")


def _check_unseen(runs: Path, json: bool) -> None:
    from phalanx.plan.evidence.calibrate import calibrate as fit

    with working("fit", json):
        calibration = fit(runs)
    if json:
        print_json(calibration.unseen)
        return
    from phalanx.cli.plan.evidence_tables import print_unseen

    print_unseen(calibration)


def _calibrate_to_runs(runs: Path, out: Path | None, json: bool) -> None:
    from phalanx.plan.cost.constants import constants_toml
    from phalanx.plan.evidence.calibrate import calibrate as fit

    with working("fit", json):
        calibration = fit(runs)
    if out is not None:
        _write(out, constants_toml(calibration.constants))
    if json:
        print_json(calibration)
        return
    from phalanx.cli.plan.evidence_tables import print_calibration

    print_calibration(calibration)


def _calibrate_to_device(out: Path | None, json: bool) -> None:
    from phalanx.plan.cost.constants import constants_toml, shipped
    from phalanx.plan.cost.measured import constants_from
    from phalanx.train.calibrate.microbench import (
        measure_device,  # torch: only where a GPU is timed
    )

    with working("measure this device", json):
        measured = measure_device()
    constants = constants_from(measured, shipped())
    if out is not None:
        _write(out, constants_toml(constants))
    if json:
        print_json({"measured": measured, "constants": constants})
        return
    print(constants_toml(constants), end="")


def _readable(path: Path) -> Path:
    try:
        path.read_text(encoding="utf-8")
    except FileNotFoundError:
        fix = "give the path of a CSV file of measurements"
        raise ConfigError("file", str(path), "no such file", fix) from None
    except (OSError, UnicodeDecodeError) as error:
        rule = f"cannot be read as CSV: {plain_reason(error)}"
        fix = "give a CSV file that you may read"
        raise ConfigError("file", str(path), rule, fix) from None
    return path


def _completed(request: PlanRequest, json: bool) -> PlanRequest:
    """Nothing is missing, and what the cluster knows is filled in."""
    for name in ("model", "cluster"):
        if not getattr(request, name):
            example = {"model": "llama3-405b", "cluster": "h100-16k"}[name]
            raise ConfigError(f"--{name}", "", "is missing", f"e.g. --{name} {example}")
    if request.failure_rate != "fleet":
        return request
    with connected("", json) as client:
        rates = client.get("/v1/failure-rates", FailureRates).rates
    if not rates:
        raise ConfigError("--failure-rate", "fleet", "no gang has run there yet", "llama3")
    same = [each for each in rates if each.kind and request.cluster.startswith(each.kind)]
    most = max(same or rates, key=lambda each: each.node_days)
    return structs.replace(request, failure_rate=f"{most.nodes_per_1000:.4g}")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        rule = f"cannot be written: {plain_reason(error)}"
        fix = "give a path in a folder where you may write"
        raise ConfigError("emit", str(path), rule, fix) from None
