"""``phalanx scale``: another number of replicas for a job."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.cli.connection import connected, print_done
from phalanx.cli.options import JobNumber, Json, ServerUrl, State
from phalanx.cli.queue.job_orders import Why
from phalanx.control.wire.api_types import Done, Replicas

app = typer.Typer()


@app.command()
def scale(
    job: JobNumber,
    replicas: Annotated[
        int, typer.Argument(min=0, help="Number of replicas; 0: given by --gpus.")
    ] = 0,
    gpus: Annotated[int, typer.Option(min=0, help="The same as a number of GPUs.")] = 0,
    why: Why = "",
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Give a job another number of replicas.

    An elastic job is resized within its bounds while it runs; any other job saves its state at a
    step boundary and restarts from there with the new number.
    """
    with connected(server, json, state) as client:
        body = Replicas(replicas=replicas, gpus=gpus, why=why)
        done = client.post(f"/v1/jobs/{job}/scale", body, Done)
    print_done(f"job {job}", done, json)
