"""``phalanx lead``: one job inside an allocation, run by batch scripts and controllers' pods."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from phalanx.cli.job_file import load
from phalanx.cli.options import FirstStepMinutes, HangMinutes, IdleMinutes
from phalanx.cli.output import exit_on_config_error

if TYPE_CHECKING:
    from phalanx.control.backends.site import Site

app = typer.Typer()


@app.command()
def lead(
    what: Annotated[list[str], typer.Argument(metavar="JOB.toml | -- PROGRAM…")],
    engine: Annotated[Literal["slurm", "kubernetes"], typer.Option(help="Whose allocation.")],
    state: Annotated[Path, typer.Option(help="Of the controller, on shared storage.")],
    url: Annotated[str, typer.Option(help="Where agents find the controller.")],
    nodes: Annotated[int, typer.Option(min=1, help="That the gang needs.")],
    gpus: Annotated[int, typer.Option(min=1, help="Ranks on each of them.")],
    world_size: Annotated[int, typer.Option(min=1, help="Ranks of the gang.")],
    spares: Annotated[int, typer.Option(min=0, help="Nodes beside, that stand by.")] = 0,
    name: Annotated[str, typer.Option(help="Of the job.")] = "",
    team: Annotated[str, typer.Option(help="Whose job it is.")] = "default",
    least: Annotated[int, typer.Option(min=0, help="Fewest replicas; 0: not elastic.")] = 0,
    most: Annotated[int, typer.Option(min=0, help="Most replicas; 0: as submitted.")] = 0,
    retries: Annotated[int, typer.Option(min=0, help="After failures of its own.")] = 3,
    first_step_minutes: FirstStepMinutes = 0.0,
    hang_minutes: HangMinutes = 0.0,
    idle_minutes: IdleMinutes = 0.0,
    policy: Annotated[Path | None, typer.Option(help="TOML of the controller's policy.")] = None,
    server: Annotated[bool, typer.Option("--server", help="The controller is elsewhere.")] = False,
) -> None:
    """Lead a job inside an allocation (see what `phalanx submit --backend … --dry-run` prints).

    Ends with 0 or 1 when the job has ended, with 75 when it waits for its next allocation.
    """
    from phalanx.config import resolve
    from phalanx.control.backends.lead import Lead, LeadError, LeadOptions
    from phalanx.control.backends.need import need_of
    from phalanx.control.client.client import ClientError
    from phalanx.control.server.http.submission import Wanted

    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    job, argv = None, tuple(what)
    with exit_on_config_error():
        if what[0].endswith(".toml"):
            job, argv = resolve(load(Path(what[0]), None, world_size)[0], world_size), ()
        traffic = need_of(job, world_size, spares, gpus).traffic
    wanted = Wanted(
        job=job,
        argv=argv,
        ranks=world_size,
        folder=str(Path.cwd()),
        name=name,
        team=team,
        least=least,
        most=most,
        spares=spares,
        retries=retries,
        first_step_minutes=first_step_minutes,
        hang_minutes=hang_minutes,
        idle_minutes=idle_minutes,
        traffic=traffic,
        environment={"PHALANX_RUN": state.absolute().parent.name},
    )
    options = LeadOptions(
        state=state,
        url=url,
        wanted=wanted,
        node_gpus=gpus,
        slots=nodes,
        policy=policy,
        own_server=not server,
        feature=f"slurm_{os.environ.get('SLURM_JOB_ID', '')}" if server else "",
    )
    leading = Lead(options, _site(engine, nodes + spares, wanted.title))
    try:
        code = leading.run()
    except (LeadError, ClientError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    if engine == "slurm":
        from phalanx.control.backends.slurm.submit import remember_quarantined

        remember_quarantined(leading.quarantined)
    raise typer.Exit(code)


def _site(engine: str, count: int, title: str) -> Site:
    if engine == "kubernetes":
        from phalanx.control.backends.kubernetes.pods import object_name
        from phalanx.control.backends.kubernetes.site import KubernetesSite

        return KubernetesSite(count, object_name(title), os.environ)
    from phalanx.control.backends.slurm.facts import SlurmSite

    if "SLURM_JOB_ID" not in os.environ:
        print("error: this runs inside an allocation: SLURM_JOB_ID is not set", file=sys.stderr)
        raise typer.Exit(2)
    return SlurmSite(os.environ)
