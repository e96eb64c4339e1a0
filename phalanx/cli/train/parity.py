"""``phalanx parity``: prove that every mesh trains a job's model as one process does."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.options import JobFile, Json, Set
from phalanx.cli.output import exit_on_config_error, print_json, print_stopped_early
from phalanx.config import load_job
from phalanx.train.rank.stop import left_on_signal
from phalanx.train.rank.threads import keep_single_threaded

if TYPE_CHECKING:
    from phalanx.train.parity.prove import MeshComparison

app = typer.Typer()


@app.command()
def parity(
    path: JobFile,
    overrides: Set = None,
    ranks: Annotated[
        int,
        typer.Option(
            "--ranks", min=2, max=64, help="Largest mesh to try, in ranks on this machine."
        ),
    ] = 4,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Number of steps to compare.")] = 3,
    only: Annotated[
        list[str] | None,
        typer.Option("--mesh", metavar="NAME", help="Only this mesh, as printed (repeatable)."),
    ] = None,
    reshard: Annotated[
        bool,
        typer.Option("--reshard", help="Also resume each mesh's checkpoint on every other mesh."),
    ] = False,
    json: Json = False,
) -> None:
    """Train a small copy of a job's model on every mesh and on one process, and compare them."""
    with exit_on_config_error(json):
        job = load_job(path, overrides or [])
    keep_single_threaded()
    # Only now torch: ranks are forked from a process that has one thread.
    with left_on_signal(partial(print_stopped_early, json)):
        from phalanx.train.parity.prove import prove

    from phalanx.cli.train.parity_tables import print_comparison, print_reshards, print_verdict

    def seen(comparison: MeshComparison) -> None:
        if not json and not comparison.source:
            print_comparison(comparison)

    with exit_on_config_error(json):
        comparisons = prove(job, ranks, steps, reshard=reshard, seen=seen, only=only or ())
    if json:
        print_json([{**_fields(one), "same": one.same} for one in comparisons])
    else:
        print_reshards([one for one in comparisons if one.source])
        print_verdict(comparisons)
    raise typer.Exit(1 if any(one.differs for one in comparisons) else 0)


def _fields(found: MeshComparison) -> dict[str, object]:
    return {name: getattr(found, name) for name in found.__struct_fields__}
