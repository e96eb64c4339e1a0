"""``phalanx doctor fabric``: what every pair and group of nodes reaches, and what is slow."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.connection import connected
from phalanx.cli.option_struct import takes_options
from phalanx.cli.options import Json, ServerUrl, State
from phalanx.cli.output import (
    exit_on,
    exit_on_config_error,
    print_json,
    refuse_unwritable,
    write_out,
)

if TYPE_CHECKING:
    from phalanx.control.client.fabric_job import FabricJob
    from phalanx.doctor.fabric.report import FabricProblem, FabricReport

SLOW = 1  # exit code


@dataclass(frozen=True, kw_only=True)
class FabricCommand:
    """What ``phalanx doctor fabric`` is asked for."""

    nodes: Annotated[int, typer.Option(min=0, help="How many; 0: all that are free.")] = 0
    constraint: Annotated[str, typer.Option(help='Nodes it takes, e.g. "h100 & nvlink".')] = ""
    pairs: Annotated[
        str,
        typer.Option(
            help="all, log (a logarithmic number of peers a node), none, or auto: all of up to 64."
        ),
    ] = "auto"
    pair_mib: Annotated[
        int,
        typer.Option(
            min=0, max=8192, help="Message size between pairs, in MiB; 0: chosen by device."
        ),
    ] = 0
    slower: Annotated[
        float,
        typer.Option(
            min=1, max=90, help="Report what is slower than expected by at least this many percent."
        ),
    ] = 10.0
    collective: Annotated[
        list[str] | None,
        typer.Option(help="Only this collective, or none (repeatable; default: all)."),
    ] = None
    most_mib: Annotated[
        int,
        typer.Option(
            min=0, max=8192, help="End of the sweep; 0: 16 on CPUs, 1024 on GPUs; at most 8192."
        ),
    ] = 0
    card: Annotated[
        str,
        typer.Option(help="Expect the rate of this card, e.g. ndr (default: as nodes report)."),
    ] = ""
    team: Annotated[str, typer.Option(help="Team that the job belongs to.")] = "default"
    python: Annotated[str, typer.Option(help="Python on the nodes (default: as here).")] = ""
    minutes: Annotated[float, typer.Option(min=0.1, help="Time limit of the job.")] = 60.0

    def wanted(self) -> FabricJob:
        """The job; a mistake in an option ends the command."""
        from typing import get_args

        from phalanx.control.client.fabric_job import FabricJob
        from phalanx.doctor.fabric.report import (
            COLLECTIVES,
            FabricRequest,
            PairsWanted,
            floor_of,
        )

        if self.pairs not in get_args(PairsWanted):
            choices = ", ".join(get_args(PairsWanted))
            raise typer.BadParameter(f"--pairs {self.pairs!r}: one of {choices}")
        if self.card:
            floor_of(self.card)
        chosen = tuple(self.collective or COLLECTIVES)
        if chosen == ("none",):
            chosen = ()
        for name in chosen:
            if name not in COLLECTIVES:
                choices = ", ".join(COLLECTIVES)
                raise typer.BadParameter(f"--collective {name!r}: one of {choices}, or none")
        request = FabricRequest(
            pairs=self.pairs,  # type: ignore[arg-type]
            pair_bytes=self.pair_mib << 20,
            slower=self.slower / 100,
            collectives=chosen,
            most_bytes=self.most_mib << 20,
        )
        return FabricJob(
            request=request,
            nodes=self.nodes,
            constraint=self.constraint,
            team=self.team,
            python=self.python,
            minutes=self.minutes,
        )


@takes_options
def fabric(
    command: FabricCommand,
    picture: Annotated[
        Path | None, typer.Option(help="Write the heat map here: NAME.svg or NAME.html.")
    ] = None,
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Measure pairs and collectives between nodes of a cluster, and name what is slow.

    Runs a job on whole nodes. Exit code 0: nothing is slow, 1: something is, or it did not run.
    """
    from phalanx.control.client.fabric_job import FabricError, measure_fabric
    from phalanx.doctor.fabric.picture import picture as picture_of
    from phalanx.doctor.fabric.report import problems_of

    if picture is not None and picture.suffix not in (".svg", ".html"):
        raise typer.BadParameter(f"--picture {picture}: its name ends in .svg or .html")
    refuse_unwritable(picture, "--picture")
    with exit_on_config_error(json), exit_on(FabricError), connected(server, json, state) as client:
        wanted = command.wanted()
        report = measure_fabric(client, wanted, (lambda _: None) if json else _progress)
        problems = problems_of(report, command.card)
    if picture is not None:
        write_out(picture, picture_of(picture.name, report, problems).encode(), "--picture")
    if json:
        print_json({"report": report, "problems": problems})
    else:
        show_report(report, problems)
    if problems:
        raise typer.Exit(SLOW)


def _progress(line: str) -> None:
    import sys

    from phalanx.cli.tables import plain

    print(plain(line), file=sys.stderr)


def show_report(report: FabricReport, problems: list[FabricProblem]) -> None:
    """A report for a person at a terminal."""
    from rich.console import Console
    from rich.text import Text

    from phalanx.doctor.fabric.picture import MOST_IN_TERMINAL, terminal_rows
    from phalanx.doctor.fabric.report import all_clear

    console = Console(soft_wrap=True, highlight=False)
    if report.pairs and len(report.nodes) <= MOST_IN_TERMINAL:
        print("pairs, percent of the usual rate:")
        for cells in terminal_rows(report):
            console.print(Text.assemble(*cells))
    if report.outcome is not None:
        outcome = report.outcome
        near = outcome.usual.get("leaf", 0.0)
        for tier, rate in outcome.usual.items():
            share = f", {rate / near:.0%} of that within a leaf" if near and tier != "leaf" else ""
            print(f"usual rate of pairs ({tier}): {rate / 1e9:.3g} GB/s one way{share}")
        seen = f"; slower by {1 - outcome.boundary:.0%} would have been seen"
        print(
            f"{outcome.rounds} rounds, {outcome.slots} slots{seen if outcome.boundary > 0 else ''}"
        )
    for row in report.sweep:
        print(
            f"{row.collective:15}{row.bytes:>12} B "
            + (row.problem or f"{row.seconds * 1e6:>10.4g} us {row.algbw / 1e9:>9.3g} GB/s algbw ")
            + ("" if row.problem else f"{row.busbw / 1e9:>9.3g} GB/s busbw")
        )
    ways = sorted({(each.path, each.gpu_direct) for each in report.transports})
    for path, direct in ways:
        names = [
            each.node
            for each in report.transports
            if (each.path, each.gpu_direct) == (path, direct)
        ]
        print(f"way of the bytes, by counters: {path}, GPUDirect {direct} ({len(names)} nodes)")
    for problem in problems:
        console.print(Text(f"SLOW  {problem.text}", style="red"))
    if not problems:
        print(all_clear(report))
