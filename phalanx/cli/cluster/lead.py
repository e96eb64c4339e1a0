"""``phalanx lead``: one job inside an allocation, run by batch scripts and controllers' pods."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from phalanx.cli.job_file import load
from phalanx.cli.jobs.environment import variables
from phalanx.cli.option_struct import takes_options
from phalanx.cli.options import MOST_MINUTES, FirstStepMinutes, HangMinutes, IdleMinutes
from phalanx.cli.output import exit_on, exit_on_config_error, fail
from phalanx.cli.process import log_to_stderr

if TYPE_CHECKING:
    from phalanx.control.backends.lead import LeadOptions
    from phalanx.control.backends.site import Site
    from phalanx.control.server.http.submission import RequestedWork

app = typer.Typer()


@dataclass(frozen=True, kw_only=True)
class LeadCommand:
    """What ``phalanx lead`` is asked for."""

    what: Annotated[
        list[str],
        typer.Argument(metavar="JOB.toml | -- PROGRAM…", help="A job file, or a program."),
    ]
    engine: Annotated[
        Literal["slurm", "kubernetes"], typer.Option(help="Engine that owns the allocation.")
    ]
    state: Annotated[Path, typer.Option(help="State folder of the controller, on shared storage.")]
    url: Annotated[str, typer.Option(help="Where agents find the controller.")]
    nodes: Annotated[int, typer.Option(min=1, help="Nodes that the gang needs.")]
    gpus: Annotated[int, typer.Option(min=1, help="Ranks per node.")]
    world_size: Annotated[int, typer.Option(min=1, help="Ranks of the gang.")]
    spares: Annotated[int, typer.Option(min=0, help="Spare nodes in addition.")] = 0
    name: Annotated[str, typer.Option(help="Of the job.")] = ""
    team: Annotated[str, typer.Option(help="Team that the job belongs to.")] = "default"
    least: Annotated[int, typer.Option(min=0, help="Fewest replicas; 0: not elastic.")] = 0
    most: Annotated[int, typer.Option(min=0, help="Most replicas; 0: as submitted.")] = 0
    retries: Annotated[
        int, typer.Option(min=0, help="Restarts allowed after failures of the job's own.")
    ] = 3
    slot_cpus: Annotated[int, typer.Option(min=1, help="CPUs on each node.")] = 1
    minutes: Annotated[
        float, typer.Option(min=0, max=MOST_MINUTES, help="Time limit; 0: none.")
    ] = 0.0
    env_file: Annotated[
        list[Path] | None,
        typer.Option(help="File of variables for the job, one NAME=VALUE per line."),
    ] = None
    budget_gpu_hours: Annotated[float, typer.Option(min=0, help="0: none.")] = 0.0
    budget_dollars: Annotated[float, typer.Option(min=0, help="0: none.")] = 0.0
    first_step_minutes: FirstStepMinutes = 0.0
    hang_minutes: HangMinutes = 0.0
    idle_minutes: IdleMinutes = 0.0
    policy: Annotated[Path | None, typer.Option(help="TOML of the controller's policy.")] = None
    server: Annotated[
        bool, typer.Option("--server", help="Use a controller that runs elsewhere.")
    ] = False

    def wanted(self) -> RequestedWork:
        """The job as it is described to the controller."""
        from msgspec import structs

        from phalanx.config import resolve
        from phalanx.control.backends.need import need_of
        from phalanx.control.server.http.submission import JobSchedule, RequestedWork

        job, argv = None, tuple(self.what)
        if self.what[0].endswith(".toml"):
            job, argv = load(Path(self.what[0]), None, self.world_size)[0], ()
            job = resolve(job, self.world_size)
        wanted = RequestedWork(
            job=job,
            argv=argv,
            ranks=self.world_size,
            folder=str(Path.cwd()),
            name=self.name,
            team=self.team,
            least=self.least,
            most=self.most,
            spares=self.spares,
            retries=self.retries,
            slot_cpus=self.slot_cpus,
            minutes=self.minutes,
            first_step_minutes=self.first_step_minutes,
            hang_minutes=self.hang_minutes,
            idle_minutes=self.idle_minutes,
            environment={
                **variables((), self.env_file or ()),
                "PHALANX_RUN": self.state.absolute().parent.name,
            },
            schedule=JobSchedule(
                budget_gpu_seconds=int(self.budget_gpu_hours * 3600),
                budget_micro_dollars=int(self.budget_dollars * 1_000_000),
            ),
        )
        need = need_of(structs.replace(wanted, slot_gpus=self.gpus))
        return structs.replace(wanted, traffic=need.traffic)

    def lead_options(self, wanted: RequestedWork) -> LeadOptions:
        """How the job is led."""
        from phalanx.control.backends.lead import LeadOptions

        return LeadOptions(
            state=self.state,
            url=self.url,
            wanted=wanted,
            node_gpus=self.gpus,
            slots=self.nodes,
            policy=self.policy,
            own_server=not self.server,
            feature=f"slurm_{os.environ.get('SLURM_JOB_ID', '')}" if self.server else "",
        )


@app.command()
@takes_options
def lead(command: LeadCommand) -> None:
    """Lead a job inside an allocation (see what `phalanx submit --backend … --dry-run` prints).

    Ends with 0 or 1 when the job has ended, with 75 when it waits for its next allocation.
    """
    from phalanx.control.backends.lead import BatchLeader, LeadError
    from phalanx.control.client.client import ClientError

    log_to_stderr()
    with exit_on_config_error():
        wanted = command.wanted()
    site = _site(command.engine, command.nodes + command.spares, wanted.title)
    leading = BatchLeader(command.lead_options(wanted), site)
    with exit_on(LeadError, ClientError, OSError):
        code = leading.run()
    if command.engine == "slurm":
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
        fail("this runs inside an allocation: SLURM_JOB_ID is not set", 2)
    return SlurmSite(os.environ)
