"""``phalanx scale``: another number of replicas for an elastic job."""

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
    replicas: Annotated[int, typer.Argument(min=1, help="Replicas it should have.")],
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Give an elastic job another number of replicas."""
    with connected(server, json, state) as client:
        body = Replicas(replicas=replicas)
        done = client.post(f"/v1/jobs/{job}/scale", body, Done)
    print_done(f"job {job}", done, json)
