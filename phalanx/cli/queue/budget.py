"""``phalanx budget``: what a job may use, and has used."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.cli.connection import connected
from phalanx.cli.options import JobNumber, Json, ServerUrl, State
from phalanx.cli.output import print_json
from phalanx.control.wire.api_types import Budget, Done, JobDetail

app = typer.Typer()


@app.command()
def budget(
    job: JobNumber,
    gpu_hours: Annotated[float | None, typer.Option(help="Set its budget of GPU-hours.")] = None,
    dollars: Annotated[
        float | None, typer.Option(help="The same, at the policy's price of a GPU-hour.")
    ] = None,
    none: Annotated[bool, typer.Option("--none", help="Remove its budget.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Let it continue above its budget.")
    ] = False,
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Show a job's budget and what it has used, or change it; only operators can raise it."""
    changes = gpu_hours is not None or dollars is not None or none
    if (gpu_hours is not None) + (dollars is not None) + none > 1:
        raise typer.BadParameter("give one of --gpu-hours, --dollars and --none")
    for name, amount in (("--gpu-hours", gpu_hours), ("--dollars", dollars)):
        if amount is not None and amount <= 0:
            raise typer.BadParameter(
                "lets no job run: give more than 0, or --none", param_hint=name
            )
    if force and not changes:
        raise typer.BadParameter("belongs to a budget: give --gpu-hours too", param_hint="--force")
    with connected(server, json, state) as client:
        if changes:
            body = Budget(gpu_hours=0.0 if none else gpu_hours, dollars=dollars, forced=force)
            client.post(f"/v1/jobs/{job}/budget", body, Done)
        detail = client.get(f"/v1/jobs/{job}", JobDetail)
    if json:
        found = {"budget_gpu_hours": detail.budget_gpu_hours, "forced": detail.forced}
        print_json({"job": job, **found, "used_gpu_hours": detail.used_gpu_hours})
        return
    most = f"{detail.budget_gpu_hours:,.3g} GPU-hours" if detail.budget_gpu_hours else "no budget"
    forced = ", and may go on above it" if detail.forced else ""
    print(f"job {job}: {most}{forced}; it has used {detail.used_gpu_hours:,.3g} GPU-hours")
