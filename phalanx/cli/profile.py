"""``phalanx profile``: traces of a running job, merged for Perfetto."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.options import Json, print_json
from phalanx.cli.remote import ServerUrl, State, connected
from phalanx.cli.runs import write_out
from phalanx.observe.traces import merge_traces, read_trace

app = typer.Typer()


@app.command()
def profile(
    job: Annotated[int, typer.Argument(help="A running job.")],
    steps: Annotated[int, typer.Option(min=1, max=100, help="Steps to trace.")] = 5,
    ranks: Annotated[str, typer.Option(help="Such as 0,8,16 (default: one a node).")] = "",
    out: Annotated[Path | None, typer.Option(help="File to write.")] = None,
    seconds: Annotated[float, typer.Option(min=1, help="How long to wait for the traces.")] = 300.0,
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Trace the next steps of some ranks and merge them on one clock, for ui.perfetto.dev."""
    try:
        chosen = [int(word) for word in ranks.split(",") if word]
    except ValueError:
        raise typer.BadParameter("numbers with commas between them", param_hint="--ranks") from None
    with connected(server, json, state) as client:
        began = time.time()
        body = {"steps": steps, "ranks": chosen}
        asked = client.post(f"/v1/jobs/{job}/profile", body, dict)
    if not asked["folder"] or not Path(asked["folder"]).is_dir():
        raise typer.BadParameter(
            f"the run's folder ({asked['folder'] or 'not told yet'}) is not visible here: the "
            "traces are in its logs/; run this where it is, or merge them there",
            param_hint="JOB",
        )
    found = _wait(Path(asked["folder"]) / "logs", asked["ranks"], began, seconds)
    skew = {int(rank): value for rank, value in asked["clock_skew_seconds"].items()}
    try:
        merged = merge_traces({rank: read_trace(path) for rank, path in found.items()}, skew)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="JOB") from None
    path = out or Path(f"profile-{job}.json")
    write_out(path, merged)
    if json:
        print_json({"file": str(path), "ranks": sorted(found)})
    else:
        print(f"{path}: {len(found)} ranks; open it at https://ui.perfetto.dev")


def _wait(logs: Path, ranks: list[int], began: float, seconds: float) -> dict[int, Path]:
    """The traces, once all of them are there."""
    deadline = time.monotonic() + seconds
    while True:
        found = {}
        for rank in ranks:
            paths = logs.glob(f"trace-step-*-rank-{rank}.json")
            fresh = [path for path in paths if path.stat().st_mtime >= began - 1]
            if fresh:
                found[rank] = max(fresh, key=lambda path: path.stat().st_mtime)
        if len(found) == len(ranks):
            return found
        if time.monotonic() > deadline:
            late = ", ".join(str(rank) for rank in ranks if rank not in found)
            raise typer.BadParameter(f"no trace of rank {late} within {seconds:.0f} s")
        time.sleep(0.2)
