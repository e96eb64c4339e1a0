"""``phalanx doctor``: whether a node is fit for work."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.options import Json
from phalanx.cli.output import print_json

if TYPE_CHECKING:
    from phalanx.doctor import Finding

app = typer.Typer(no_args_is_help=True, help="Check a node, with evidence.")

COLOURS = {"pass": "green", "warn": "yellow", "fail": "red", "skip": "dim"}
UNFIT = 1  # exit code


@app.callback()
def group() -> None:
    """Check a node, with evidence."""


@app.command()
def node(
    quick: Annotated[
        bool, typer.Option("--quick", help="What an agent checks when it joins: a second.")
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="CHECK", help="This check (repeatable).")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="On the disk to test (default: here).")
    ] = None,
    mount: Annotated[
        list[Path] | None, typer.Option("--mount", help="A folder that must answer (repeatable).")
    ] = None,
    gpus: Annotated[int, typer.Option(min=0, help="GPUs that must be there.")] = 0,
    inject: Annotated[
        list[str] | None, typer.Option(help="Let this check fail, to see what happens then.")
    ] = None,
    json: Json = False,
) -> None:
    """Check this node: numbers, memory, collectives, disk, mounts, clock, limits, GPUs.

    Exit code 0: fit for work (warnings included), 1: something failed.
    """
    from phalanx.train.rank.threads import keep_single_threaded

    keep_single_threaded()  # the collective's ranks are forked
    from phalanx.doctor import CHECKS, CheckOptions, check_node
    from phalanx.doctor.node import default_folder

    for name in (*(only or ()), *(inject or ())):
        if name not in CHECKS:
            raise typer.BadParameter(f"{name!r} is no check: one of {', '.join(CHECKS)}")
    folder = folder or default_folder()
    if not folder.is_dir():
        raise typer.BadParameter(f"{folder} is no folder")
    options = CheckOptions(
        node=socket.gethostname(),
        folder=folder.absolute(),
        quick=quick,
        mounts=tuple(mount or ()),
        gpus=gpus,
        inject=tuple(inject or ()),
    )
    report = check_node(options, only or list(CHECKS), (lambda _: None) if json else _show)
    if json:
        print_json(report)
    else:
        counts = ", ".join(
            f"{sum(f.verdict == kind for f in report.findings)} {kind}" for kind in COLOURS
        )
        print(f"\n{options.node}: {'fit for work' if report.passed else 'NOT fit'} ({counts})")
    if not report.passed:
        raise typer.Exit(UNFIT)


def _show(finding: Finding) -> None:
    from rich.console import Console
    from rich.markup import escape

    from phalanx.doctor.finding import plain

    facts = ", ".join(f"{name} {plain(value)}" for name, value in finding.measured.items())
    colour, console = COLOURS[finding.verdict], Console(soft_wrap=True, highlight=False)
    console.print(
        f"[{colour}]{finding.verdict:5}[/]{escape(finding.check):28}{escape(facts)}"
        + (f"  [dim]{escape(finding.expected)}[/]" if finding.verdict == "skip" else "")
    )
    if finding.verdict in ("warn", "fail"):
        console.print(f"     expected {escape(finding.expected)}")
        console.print(f"     {escape(finding.suggestion)}")
