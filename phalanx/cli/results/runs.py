"""``phalanx runs``: what is known of runs, on a server or in folders of ``phalanx train``."""

from __future__ import annotations

import os
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.markup import escape

from phalanx.cli.connection import connected, exit_on_server_error
from phalanx.cli.options import Json, ServerUrl, State
from phalanx.cli.output import print_json, write_out
from phalanx.cli.results.run_source import RUNS, RunSource, Which, find_run_folder
from phalanx.cli.tables import add_row, plain, print_table, table
from phalanx.control.client.client import Client, ClientError
from phalanx.observe.tracker.report import short
from phalanx.observe.tracker.runs import (
    MOST_NOTE_LETTERS,
    Note,
    Run,
    annotate_folder,
    differences,
    evaluations,
    find_folders,
    load_folder,
    removed,
    validations,
)
from phalanx.train.report.run_folder import RunFolder

app = typer.Typer(no_args_is_help=True, help="Runs: list, show, compare, export, annotate.")

EXPORTED = (
    *("loss", "validation_loss", "grad_norm", "learning_rate"),
    *("tokens_per_second", "mfu", "step_seconds"),
)

Folder = Annotated[
    Path | None,
    typer.Option("--runs", help="Folder of runs (default: the server's, or runs/ without one)."),
]


@app.command("ls")
def list_runs(
    runs: Folder = None, server: ServerUrl = "", state: State = None, json: Json = False
) -> None:
    """List runs, oldest first: those of the server or, without one, of the folder runs/ here."""
    records = _all(server, state, json) if runs is None else _in_folder(runs)
    if json:
        print_json(records)
        return
    names = ("step", "loss", "validation", "tokens/s")
    shown = table("run", "name", "state", *names, "started", "tags")
    for run in records:
        last = run.summary
        add_row(
            shown,
            run.id,
            run.name,
            run.state,
            _progress(run),
            short(last.get("loss")),
            short(last.get("validation_loss")),
            short(last.get("tokens_per_second")),
            _when(run.created),
            " ".join(run.tags),
        )
    print_table(shown)


def _all(server: str, state: Path | None, json: bool) -> list[Run]:
    """What a server knows; where none answers and none was named, what lies here."""
    named = bool(server or state or os.environ.get("PHALANX_SERVER"))
    records: list[Run] = []
    with exit_on_server_error(json):
        try:
            client = Client(server, state)
            after = 0
            while True:
                page = client.get("/v1/runs", dict, after=after, limit=1000)
                records += msgspec.convert(page["runs"], list[Run])
                after = page["next_after"]
                if not after:
                    return records
        except ClientError as error:
            if named or error.status:
                raise
            if not RUNS.is_dir():
                raise ClientError(f"there is no folder {RUNS}/ here, and {error}") from None
    print(f"note: no server answers here; these are the runs in {RUNS}/", file=sys.stderr)
    return _in_folder(RUNS)


def _in_folder(runs: Path) -> list[Run]:
    """Runs below a folder; of one that cannot be read it is said why."""
    if not runs.is_dir():
        raise typer.BadParameter(f"{runs}: no such folder", param_hint="--runs")
    records = []
    for path in find_folders(runs):
        try:
            records.append(load_folder(path))
        except (ValueError, OSError) as error:
            print(f"warning: {error}", file=sys.stderr)
    return records


@app.command("show")
def show_run(run: Which, server: ServerUrl = "", state: State = None, json: Json = False) -> None:
    """Show a run: provenance, nodes, results."""
    record = RunSource(server, state, json).get(run)
    if json:
        print_json(record)
        return
    for line in describe(record):
        Console(highlight=False, soft_wrap=True).print(escape(plain(line)))


def describe(run: Run) -> list[str]:
    """A run in a few lines."""
    lines = [f"{run.id} {run.name}: {run.state}"]
    if run.exit:
        lines.append(f"end: {run.exit.get('reason', '')}: {run.exit.get('message', '')}")
    lines.append(f"started {_when(run.created)} by {run.user or '?'} {run.folder}")
    facts = run.provenance
    for name in ("project", "code"):
        code = facts.get(name) or {}
        if code:
            changed = " with changes" if code.get("dirty") else ""
            lines.append(f"{name}: {code.get('commit', '')[:12]}{changed} in {code.get('folder')}")
    torch = facts.get("torch") or {}
    packages = facts.get("packages") or {}
    lines.append(
        f"python {facts.get('python', '?')}, torch {torch.get('version', '?')}, "
        f"{len(packages)} packages, driver {facts.get('driver') or 'none'}, "
        f"image {facts.get('image') or 'none'}"
    )
    lines += [f"seed {name}: {seed}" for name, seed in (facts.get("seeds") or {}).items()]
    lines += [f"data {name}: {value}" for name, value in (facts.get("data") or {}).items()]
    if plan := run.plan.get("prediction"):
        mfu, seconds = plan.get("mfu", 0.0), plan.get("step_seconds", 0.0)
        lines.append(f"planned: {seconds:.3g} s a step, MFU {mfu:.1%}")
    shown = {n: value for n, value in run.summary.items() if n not in ("time", "scores")}
    lines += [f"{name}: {short(value)}" for name, value in shown.items()]
    scores = run.summary.get("scores") or {}
    lines += [f"score {name}: {short(value)}" for name, value in scores.items()]
    for place in run.placements:
        nodes = ", ".join(place.get("nodes", [])[:8])
        lines.append(f"generation {place.get('generation')} since {_when(place['time'])}: {nodes}")
    kept = [each for each in run.checkpoints if not removed(each["path"])]
    lines += [f"checkpoint {each['step']}: {each['path']}" for each in kept[-5:]]
    lines += [f"tag {tag}" for tag in run.tags]
    lines += [f"note {_when(note.time)} {note.by}: {note.text}" for note in run.notes]
    return lines


@app.command()
def diff(
    a: Which, b: Which, server: ServerUrl = "", state: State = None, json: Json = False
) -> None:
    """Compare two runs: settings, code, packages, data, versions."""
    source = RunSource(server, state, json)
    changed = differences(source.get(a), source.get(b))
    if json:
        print_json(changed)
        return
    if not changed:
        print("nothing differs that would matter")
        return
    shown = table("", "", a, b)
    for each in changed:
        add_row(shown, each.section, each.key, *(_value(value) for value in (each.a, each.b)))
    print_table(shown)


@app.command()
def export(
    run: Which,
    out: Annotated[Path, typer.Option(help="File to write.")],
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Export a run with its metrics into one JSON file."""
    record = RunSource(server, state, json).get(run)
    whole: dict[str, Any] = {"run": record}
    if run.isdigit():
        with connected(server, json, state) as client:
            names = ",".join([*EXPORTED, *(record.summary.get("scores") or {})])
            path = f"/v1/jobs/{run}/metrics"
            whole["metrics"] = client.get(path, dict, names=names, points=5000)["series"]
            whole["incidents"] = client.get(f"/v1/jobs/{run}/incidents", dict)["findings"]
    else:
        steps = Path(record.folder) / "metrics" / "steps.jsonl"
        lines = steps.read_bytes().splitlines() if steps.exists() else []
        whole["steps"] = [msgspec.Raw(line) for line in lines if _is_json(line)]
        whole["validations"] = validations(RunFolder(Path(record.folder)))
        whole["evaluations"] = evaluations(RunFolder(Path(record.folder)))
    write_out(out, msgspec.json.format(msgspec.json.encode(whole), indent=1) + b"\n")
    if json:
        print_json({"file": str(out)})
    else:
        print(out)


def _is_json(line: bytes) -> bool:
    try:
        msgspec.json.decode(line)
    except msgspec.MsgspecError:
        return False  # cut in the middle of a write
    return True


@app.command()
def note(
    run: Which,
    text: Annotated[str, typer.Argument(help="What to note.")],
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Write a note about a run."""
    if not 0 < len(text) <= MOST_NOTE_LETTERS:
        raise typer.BadParameter(f"a note has 1 to {MOST_NOTE_LETTERS} letters", param_hint="TEXT")
    if run.isdigit():
        with connected(server, json, state) as client:
            record = client.post(f"/v1/runs/{run}/notes", {"text": text}, Run)
    else:
        record = RunSource(server, state, json).get(run)
        record.notes.append(Note(time=time.time(), text=text))
        annotate_folder(find_run_folder(run), record)
    if json:
        print_json(record.notes)


@app.command()
def tag(
    run: Which,
    tags: Annotated[
        list[str], typer.Argument(metavar="TAG…", help="Tags to add; -NAME removes one.")
    ],
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Give a run tags."""
    source = RunSource(server, state, json)
    record = source.get(run)
    kept = dict.fromkeys(record.tags)
    for each in tags:
        if each.startswith("-"):
            kept.pop(each[1:], None)
        else:
            kept[each] = None
    record.tags = list(kept)
    if run.isdigit():
        with connected(server, json, state) as client:
            client.put(f"/v1/runs/{run}/tags", {"tags": record.tags}, Run)
    else:
        annotate_folder(find_run_folder(run), record)
    if json:
        print_json(record.tags)


def _progress(run: Run) -> str:
    """Steps made of those wanted."""
    made, wanted = run.summary.get("step"), (run.config.get("train") or {}).get("steps")
    return "" if made is None else f"{made}/{wanted}" if wanted else str(made)


def _value(value: object) -> str:
    return "-" if value is None else value if isinstance(value, str) else str(value)


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S") if seconds else ""
