"""Options and arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.completion import job_numbers, nodes_and_jobs

JobFile = Annotated[Path, typer.Argument(metavar="JOB.toml", help="File that describes the job.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one setting (repeatable)."),
]
WorldSize = Annotated[
    int | None,
    typer.Option(
        min=1, help="Number of ranks (default: the product of the axes, or one a device)."
    ),
]
MOST_MINUTES = 5_000_000  # some ten years
FirstStepMinutes = Annotated[
    float,
    typer.Option(
        min=0, max=MOST_MINUTES, help="Allowance for the first step; 0: as the policy says."
    ),
]
HangMinutes = Annotated[
    float,
    typer.Option(
        min=0,
        max=MOST_MINUTES,
        help="Treat the job as hung after so long without a step; 0: derived.",
    ),
]
IdleMinutes = Annotated[
    float,
    typer.Option(
        min=0,
        max=MOST_MINUTES,
        help="Restart a program without steps, CPU, GPU and output activity for so long; "
        "0: as the policy says.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
JobOrRun = Annotated[
    str,
    typer.Argument(
        metavar="JOB",
        help="Number of the job; slurm:NUMBER or folder of a run that has ended.",
        autocompletion=job_numbers,
    ),
]
JobNumber = Annotated[
    int,
    typer.Argument(metavar="JOB", min=1, help="Number of the job.", autocompletion=job_numbers),
]
NodeOrJob = Annotated[
    str,
    typer.Argument(metavar="NODE|JOB", help="Name or number.", autocompletion=nodes_and_jobs),
]
ServerUrl = Annotated[
    str,
    typer.Option(
        "--server",
        metavar="URL",
        help="The server (default: PHALANX_SERVER, or the one of this machine).",
    ),
]
State = Annotated[
    Path | None,
    typer.Option(help="State folder of a server here (default: ~/.phalanx/server)."),
]
