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

from phalanx.cli.connection import (
    ServerUrl,
    State,
    add_row,
    connected,
    plain,
    refusals_in_words,
    show,
    table,
)
from phalanx.cli.options import Json, print_json
from phalanx.control.client.client import Client, ClientError
from phalanx.observe.tracker.runs import (
    MOST_NOTE_LETTERS,
    Note,
    Run,
    annotate_folder,
    differences,
    find_folders,
    load_folder,
    removed,
    validations,
)
from phalanx.train.report.run_folder import RunFolder

app = typer.Typer(no_args_is_help=True, help="Runs: list, show, compare, export, annotate.")
ledger_app = typer.Typer()

Which = Annotated[
    str, typer.Argument(metavar="RUN", help="Number of a job, or folder of `phalanx train`.")
]
Folder = Annotated[
    Path | None,
    typer.Option("--runs", help="Folder of runs (default: the server's, or runs/ without one)."),
]
RUNS = Path("runs")  # where `phalanx train` puts them


class Source:
    """Where a run is looked up: a number is a server's, anything else a folder."""

    def __init__(self, server: str, state: Path | None, json: bool) -> None:
        self.server, self.state, self.json = server, state, json

    def get(self, which: str) -> Run:
        """One run."""
        if which.isdigit():
            with connected(self.server, self.json, self.state) as client:
                return client.get(f"/v1/runs/{which}", Run)
        try:
            return load_folder(find(which))
        except (ValueError, OSError) as error:
            raise typer.BadParameter(str(error), param_hint="RUN") from None


def find(which: str) -> Path:
    """The folder of a run by its path, or by its name and id below ``runs/``."""
    for path in (Path(which), RUNS / which):
        if path.is_dir():
            return path
    raise ValueError(f"{which}: no such folder, and no number of a job")


@app.command("ls")
def list_runs(
    runs: Folder = None, server: ServerUrl = "", state: State = None, json: Json = False
) -> None:
    """List runs, oldest first: those of the server or, without one, of the folder runs/ here."""
    found = _all(server, state, json) if runs is None else _in_folder(runs)
    if json:
        print_json(found)
        return
    names = ("step", "loss", "validation", "tokens/s")
    shown = table("run", "name", "state", *names, "started", "tags")
    for run in found:
        last = run.summary
        add_row(
            shown,
            run.id,
            run.name,
            run.state,
            _progress(run),
            _short(last.get("loss")),
            _short(last.get("validation_loss")),
            _short(last.get("tokens_per_second")),
            _when(run.created),
            " ".join(run.tags),
        )
    show(shown)


def _all(server: str, state: Path | None, json: bool) -> list[Run]:
    """What a server knows; where none answers and none was named, what lies here."""
    named = bool(server or state or os.environ.get("PHALANX_SERVER"))
    found: list[Run] = []
    with refusals_in_words(json):
        try:
            client = Client(server, state)
            after = 0
            while True:
                page = client.get("/v1/runs", dict, after=after, limit=1000)
                found += msgspec.convert(page["runs"], list[Run])
                after = page["next_after"]
                if not after:
                    return found
        except ClientError as error:
            if named or error.status or not RUNS.is_dir():
                raise
    print(f"note: no server answers here; these are the runs in {RUNS}/", file=sys.stderr)
    return _in_folder(RUNS)


def _in_folder(runs: Path) -> list[Run]:
    """Runs below a folder; of one that cannot be read it is said why."""
    if not runs.is_dir():
        raise typer.BadParameter(f"{runs}: no such folder", param_hint="--runs")
    found = []
    for path in find_folders(runs):
        try:
            found.append(load_folder(path))
        except (ValueError, OSError) as error:
            print(f"warning: {error}", file=sys.stderr)
    return found


@app.command("show")
def show_run(run: Which, server: ServerUrl = "", state: State = None, json: Json = False) -> None:
    """Show a run: where it comes from, where it ran, how it went."""
    found = Source(server, state, json).get(run)
    if json:
        print_json(found)
        return
    for line in describe(found):
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
    shown = {name: value for name, value in run.summary.items() if name != "time"}
    lines += [f"{name}: {_short(value)}" for name, value in shown.items()]
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
    """Say what differs between two runs: settings, code, packages, data, versions."""
    source = Source(server, state, json)
    found = differences(source.get(a), source.get(b))
    if json:
        print_json(found)
        return
    if not found:
        print("nothing differs that would matter")
        return
    shown = table("", "", a, b)
    for each in found:
        add_row(shown, each.section, each.key, *(_value(value) for value in (each.a, each.b)))
    show(shown)


@app.command()
def export(
    run: Which,
    out: Annotated[Path, typer.Option(help="File to write.")],
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Write everything that is known of a run, with its curves, into one JSON file."""
    found = Source(server, state, json).get(run)
    whole: dict[str, Any] = {"run": found}
    if run.isdigit():
        with connected(server, json, state) as client:
            names = (
                "loss,validation_loss,grad_norm,learning_rate,tokens_per_second,mfu,step_seconds"
            )
            path = f"/v1/jobs/{run}/metrics"
            whole["metrics"] = client.get(path, dict, names=names, points=5000)["series"]
            whole["incidents"] = client.get(f"/v1/jobs/{run}/incidents", dict)["findings"]
    else:
        steps = Path(found.folder) / "metrics" / "steps.jsonl"
        lines = steps.read_bytes().splitlines() if steps.exists() else []
        whole["steps"] = [msgspec.Raw(line) for line in lines if _is_json(line)]
        whole["validations"] = validations(RunFolder(Path(found.folder)))
    write_out(out, msgspec.json.format(msgspec.json.encode(whole), indent=1) + b"\n")
    if json:
        print_json({"file": str(out)})
    else:
        print(out)


def write_out(path: Path, data: bytes) -> None:
    """Write a file that the user named; what is wrong with it is said in words."""
    try:
        path.write_bytes(data)
    except OSError as error:
        raise typer.BadParameter(f"{path}: {error.strerror}", param_hint="--out") from None


def _is_json(line: bytes) -> bool:
    try:
        msgspec.json.decode(line)
    except msgspec.MsgspecError:
        return False  # cut in the middle of a write
    return True


@app.command()
def note(
    run: Which, text: str, server: ServerUrl = "", state: State = None, json: Json = False
) -> None:
    """Write a note about a run."""
    if not 0 < len(text) <= MOST_NOTE_LETTERS:
        raise typer.BadParameter(f"a note has 1 to {MOST_NOTE_LETTERS} letters", param_hint="TEXT")
    if run.isdigit():
        with connected(server, json, state) as client:
            found = client.post(f"/v1/runs/{run}/notes", {"text": text}, Run)
    else:
        found = Source(server, state, json).get(run)
        found.notes.append(Note(time=time.time(), text=text))
        annotate_folder(find(run), found)
    if json:
        print_json(found.notes)


@app.command()
def tag(
    run: Which,
    tags: Annotated[list[str], typer.Argument(metavar="TAG…", help="-NAME takes one away.")],
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Give a run tags."""
    source = Source(server, state, json)
    found = source.get(run)
    kept = dict.fromkeys(found.tags)
    for each in tags:
        if each.startswith("-"):
            kept.pop(each[1:], None)
        else:
            kept[each] = None
    found.tags = list(kept)
    if run.isdigit():
        with connected(server, json, state) as client:
            client.put(f"/v1/runs/{run}/tags", {"tags": found.tags}, Run)
    else:
        annotate_folder(find(run), found)
    if json:
        print_json(found.tags)


@ledger_app.command()
def ledger(
    job: Annotated[int, typer.Argument(min=0, help="A job (default: everything).")] = 0,
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Say where GPU time went: every GPU-nanosecond in one bucket, which sum to the allocation."""
    with connected(server, json, state) as client:
        path = f"/v1/jobs/{job}/ledger" if job else "/v1/ledger/timeline"
        found = client.get(path, dict)
    if json:
        print_json(found)
        return
    total = int(found["allocation_gpu_ns"])
    shown = table("bucket", "GPU-hours", "share")
    for name, text in found["buckets"].items():
        if int(text):
            words = f"{name} (estimated)" if name in found["estimated"] else name
            add_row(shown, words, f"{int(text) / 3.6e12:.4f}", f"{int(text) / total:.2%}")
    add_row(shown, "allocation", f"{total / 3.6e12:.4f}", "100.00%")
    show(shown)
    if not int(found["buckets"].get("exposed_communication", 0)):
        print("productive time is whole steps: no plan says how much of them is communication")
    if int(found["buckets"].get("unreported", 0)):
        print("unreported time is of programs that report no steps: phalanx.worker() would tell")
    print(f"goodput {found['goodput']:.2%}, ETTR {found['ettr']:.2%}, ${found['dollars']:.2f}")
    if sum(map(int, found["buckets"].values())) != total:
        print("error: the buckets do not sum to the allocation", file=sys.stderr)
        raise typer.Exit(1)


def _progress(run: Run) -> str:
    """Steps made of those wanted."""
    made, wanted = run.summary.get("step"), (run.config.get("train") or {}).get("steps")
    return "" if made is None else f"{made}/{wanted}" if wanted else str(made)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def _value(value: object) -> str:
    return "-" if value is None else value if isinstance(value, str) else str(value)


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S") if seconds else ""
