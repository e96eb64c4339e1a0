"""``phalanx scale``: another number of replicas for a job."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.cli.connection import connected, print_done
from phalanx.cli.options import JobNumber, Json, ServerUrl, State
from phalanx.control.wire.api_types import Done, Replicas

app = typer.Typer()


@app.command()
def scale(
    job: JobNumber,
    replicas: Annotated[
        int, typer.Argument(min=0, help="Replicas it should have; 0: as --gpus says.")
    ] = 0,
    gpus: Annotated[int, typer.Option(min=0, help="The same in GPUs.")] = 0,
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Give a job another number of replicas.

    An elastic job changes within its bounds while it runs; any other saves its state at a step
    boundary and goes on from there with all of them.
    """
    with connected(server, json, state) as client:
        body = Replicas(replicas=replicas, gpus=gpus)
        done = client.post(f"/v1/jobs/{job}/scale", body, Done)
    print_done(f"job {job}", done, json)
