"""``phalanx report``: a run's post-mortem as HTML and Markdown."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from phalanx.cli.connection import connected
from phalanx.cli.options import ServerUrl, State
from phalanx.cli.output import print_json, write_out
from phalanx.cli.progress import working
from phalanx.cli.results.run_source import RunSource, Which
from phalanx.observe.tracker.report import PARTS, Curve, ReportInput
from phalanx.observe.tracker.report_pages import html, markdown
from phalanx.observe.tracker.runs import Run, validations
from phalanx.train.report.records import StepRecord
from phalanx.train.report.run_folder import RunFolder

app = typer.Typer()
CURVES = ("loss", "grad_norm", "step_seconds", "mfu", "tokens_per_second")


@app.command()
def report(
    run: Which,
    out: Annotated[
        Path | None,
        typer.Option(help="Name of both files, without .html and .md (default: report-RUN)."),
    ] = None,
    server: ServerUrl = "",
    state: State = None,
    json: Annotated[bool, typer.Option("--json", help="Print the files' names as JSON.")] = False,
) -> None:
    """Write what happened to a run, where its time went and what to change."""
    record = RunSource(server, state, json).get(run)
    with working("gather what happened", json):
        if run.isdigit():
            material = _from_server(run, record, server, state, json)
        else:
            material = _from_folder(record)
    base = out or Path(f"report-{record.id.replace('/', '-')}")
    files = [base.with_suffix(".html"), base.with_suffix(".md")]
    write_out(files[0], html(material).encode())
    write_out(files[1], markdown(material).encode())
    if json:
        print_json([str(path) for path in files])
    else:
        print("\n".join(map(str, files)))


def _from_server(run: str, record: Run, server: str, state: Path | None, json: bool) -> ReportInput:
    names = ",".join([*CURVES, "validation_loss", *(f"{part}_seconds" for part in PARTS)])
    with connected(server, json, state) as client:
        series = client.get(f"/v1/jobs/{run}/metrics", dict, names=names, points=1000)["series"]
        incidents = client.get(f"/v1/jobs/{run}/incidents", dict)["findings"]
        of_nodes = client.get("/v1/findings", dict, limit=1000)["findings"]
        ranks = client.get(f"/v1/jobs/{run}/ranks", dict, columns=100)
        detail: dict[str, Any] = client.get(f"/v1/jobs/{run}", dict)
        ledger: dict[str, Any] = {}
        if detail["used_gpu_hours"]:
            ledger = client.get(f"/v1/jobs/{run}/ledger", dict)
    own = [_mean(row) for row in ranks["own_seconds"]]
    return ReportInput(
        run=record,
        curves={name: Curve(each["step"], each["value"]) for name, each in series.items()},
        incidents=sorted([*incidents, *_of_nodes(record, of_nodes)], key=lambda each: each["time"]),
        ledger=ledger,
        requested=detail["spec"],
        rank_means={"own_seconds": own},
        rank_names=[
            f"one on {node}" if ranks["rows"] == "node" else f"{rank} on {node}"
            for rank, node in zip(ranks["ranks"], ranks["nodes"], strict=True)
        ],
    )


def _of_nodes(run: Run, findings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was found about the run's nodes, and no job in particular, while it ran."""
    nodes = {node for place in run.placements for node in place.get("nodes", [])}
    until = run.ended or time.time()
    return [
        each
        for each in findings
        if not each["job"] and each["node"] in nodes and run.created <= each["time"] <= until
    ]


def _from_folder(run: Run) -> ReportInput:
    path = Path(run.folder) / "metrics" / "steps.jsonl"
    records: list[StepRecord] = []
    unread = 0
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            records.append(msgspec.json.decode(line, type=StepRecord))
        except msgspec.MsgspecError:
            unread += 1  # cut in the middle of a write
    thin = records[:: max(1, len(records) // 1000)]
    steps = [record.step for record in thin]
    curves = {name: Curve(steps, [getattr(record, name) for record in thin]) for name in CURVES}
    for part in PARTS:
        name = "peer_wait" if part == "exposed_communication" else part
        values = [getattr(record.parts, name) for record in thin]
        curves[f"{part}_seconds"] = Curve(steps, values)
    validated = validations(RunFolder(Path(run.folder)))
    curves["validation_loss"] = Curve(
        [record.step for record in validated], [record.loss for record in validated]
    )
    return ReportInput(run=run, curves=curves, unread_lines=unread)


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
