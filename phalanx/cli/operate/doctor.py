"""``phalanx doctor``: whether nodes are fit for work, and what would make them faster."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from phalanx.cli.operate.accept import accept
from phalanx.cli.operate.drift import drift
from phalanx.cli.operate.fabric import fabric
from phalanx.cli.option_struct import takes_options
from phalanx.cli.options import Json
from phalanx.cli.output import exit_on_config_error, print_json

if TYPE_CHECKING:
    from phalanx.doctor import NodeReport
    from phalanx.doctor.examine import Request

app = typer.Typer(
    no_args_is_help=True, help="Check nodes and the network between them, with evidence."
)
app.command()(fabric)
app.command()(accept)
app.command()(drift)

UNFIT = 1  # exit code

Script = Annotated[
    Path,
    typer.Argument(metavar="FIX.sh", help="Script made by `phalanx doctor node --fix-script`."),
]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


@app.callback()
def group() -> None:
    """Check nodes and the network between them, with evidence."""


@dataclass(frozen=True, kw_only=True)
class NodeCommand:
    """What ``phalanx doctor node`` is asked for."""

    quick: Annotated[
        bool, typer.Option("--quick", help="What an agent checks when it joins: a second.")
    ] = False
    deep: Annotated[
        bool, typer.Option("--deep", help="Also measure GEMM, memory, collectives and storage.")
    ] = False
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="CHECK", help="This check, such as os.thp (repeatable)."),
    ] = None
    group: Annotated[
        list[str] | None,
        typer.Option(help="Checks of os, gpu, network, storage or compute (repeatable)."),
    ] = None
    profile: Annotated[
        list[str] | None,
        typer.Option(help="metal, vm, cloud, container (repeatable; default: as it looks)."),
    ] = None
    folder: Annotated[
        Path | None,
        typer.Option(help="Where a job would work, on the disk to test (default: here)."),
    ] = None
    mount: Annotated[
        list[Path] | None,
        typer.Option("--mount", help="Mount point that must respond (repeatable)."),
    ] = None
    gpus: Annotated[int, typer.Option(min=0, help="Number of GPUs that must be present.")] = 0
    need: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WHAT=RATE",
            help="What a job needs of storage: read or write in MB/s, files a second.",
        ),
    ] = None
    data: Annotated[
        Path | None, typer.Option(help="Data folder to check for many small files.")
    ] = None
    store: Annotated[str, typer.Option(help="Object store (s3://…) that must respond.")] = ""
    hardware: Annotated[
        Path | None, typer.Option(help="Folder of recorded evidence, read instead of this machine.")
    ] = None
    record: Annotated[
        Path | None, typer.Option(help="Folder to record the evidence of settings into.")
    ] = None
    inject: Annotated[
        list[str] | None, typer.Option(help="Make this check fail, to test the reaction.")
    ] = None


@app.command()
@takes_options
def node(
    command: NodeCommand,
    fix_script: Annotated[
        bool,
        typer.Option(
            "--fix-script", help="Print a script that fixes what can be fixed; change nothing."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Check this node's OS, GPU, network and storage settings; with --deep also measure it.

    Nothing is changed. Exit code 0: fit for work (warnings included), 1: something failed.
    """
    from phalanx.train.rank.threads import keep_single_threaded

    environment = dict(os.environ)
    keep_single_threaded()  # the collective's ranks are forked
    from phalanx.cli.operate.finding_lines import show_finding
    from phalanx.doctor.checks.fix import fix_script as script_of
    from phalanx.doctor.examine import examine

    if fix_script and (json or command.quick):
        raise typer.BadParameter("--fix-script prints a script for settings: no --json, no --quick")
    with exit_on_config_error():
        request = _request(command, environment)
        report = examine(request, (lambda _: None) if json or fix_script else show_finding)
    if fix_script:
        boot = "" if command.hardware else _boot()
        print(script_of(report.node, report.findings, boot=boot), end="")
        return
    if json:
        print_json(report)
    else:
        _show_total(report)
    if not report.passed:
        raise typer.Exit(UNFIT)


def _request(command: NodeCommand, environment: dict[str, str]) -> Request:
    from phalanx.doctor import CHECKS, CheckOptions
    from phalanx.doctor.checks.run import Source
    from phalanx.doctor.examine import Request
    from phalanx.doctor.node import default_folder
    from phalanx.doctor.selection import profiles_named, select, storage_needs

    for name in command.inject or ():
        if name not in CHECKS:
            raise typer.BadParameter(f"{name!r} is no measurement: one of {', '.join(CHECKS)}")
    implied = {
        "gpu": command.gpus,
        "rates": command.need,
        "files": command.data,
        "store": command.store,
    }
    selection = select(
        command.only or (),
        command.group or (),
        quick=command.quick,
        deep=command.deep,
        also=[*(command.inject or ()), *(name for name, asked in implied.items() if asked)],
    )
    explicit = command.quick or command.deep or "compute" in (command.group or ())
    if command.hardware and (
        explicit or command.record or any(implied.values()) or {*CHECKS} & {*(command.only or ())}
    ):
        raise typer.BadParameter(
            "--hardware is a recorded machine: it cannot be measured, only its settings judged"
        )
    folder = (command.folder or default_folder()).absolute()
    for path in (folder, command.data):
        if path is not None and not path.is_dir():
            raise typer.BadParameter(f"{path} is no folder")
    return Request(
        selection=selection,
        options=CheckOptions(
            node=f"recorded {command.hardware.name}" if command.hardware else socket.gethostname(),
            folder=folder,
            quick=selection.short,
            mounts=tuple(command.mount or ()),
            gpus=command.gpus,
            inject=tuple(command.inject or ()),
            needs=storage_needs(command.need or ()),
            data=command.data,
            store=command.store,
        ),
        source=Source(
            folder=folder,
            environment=environment,
            recorded=command.hardware,
            record=command.record,
        ),
        profiles=profiles_named(command.profile or ()),
    )


@app.command()
def apply(script: Script, yes: Yes = False) -> None:
    """Run a script made by --fix-script, after asking; `phalanx doctor undo` reverts it."""
    _run(script, "apply", yes=yes)


@app.command()
def undo(script: Script, yes: Yes = False) -> None:
    """Restore the settings from before a --fix-script script ran, after asking."""
    _run(script, "undo", yes=yes)


def _run(script: Path, action: Literal["apply", "undo"], *, yes: bool) -> None:
    from phalanx.doctor.checks.fix import booted_since, commands_of, run_commands

    with exit_on_config_error():
        commands = commands_of(script, socket.gethostname(), action)
    if not commands:
        print("nothing to run")
        return
    for line in commands:
        print(f"  {line}")
    if booted_since(script, _boot()):
        print(
            "this node has booted since the script was written: settings are as that boot made "
            "them (but ECC, MIG and stripes), and names of devices may be others'; rather write a "
            "new one (`phalanx doctor node --fix-script`)",
            file=sys.stderr,
        )
    if not yes:
        typer.confirm(f"Run these {len(commands)} commands on this node?", abort=True)
    if os.geteuid():
        print("not root: expect most of this to fail", file=sys.stderr)
    raise typer.Exit(run_commands(commands, lambda line: print(line, flush=True)))


def _boot() -> str:
    """The kernel's number of this boot; "": it does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _show_total(report: NodeReport) -> None:
    from phalanx.cli.operate.finding_lines import COLOURS

    counts = ", ".join(
        f"{sum(f.verdict == kind for f in report.findings)} {kind}" for kind in COLOURS
    )
    decided = any(finding.verdict in ("pass", "warn") for finding in report.findings)
    fit = "fit for work" if decided else "nothing could be decided"
    print(f"\n{report.node}: {fit if report.passed else 'NOT fit'} ({counts})")
    if os.geteuid() and any(finding.verdict == "unknown" for finding in report.findings):
        print("what is unknown may show to root")
    if any(finding.steps for finding in report.findings):
        print(
            "`phalanx doctor node --fix-script > fix.sh` writes the commands down, with their undo"
        )
