"""``phalanx simulate trace`` and ``policies``: recorded jobs through the queue that runs live."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.option_struct import takes_options
from phalanx.cli.options import Json, Set
from phalanx.cli.output import exit_on_config_error, print_json
from phalanx.config import ConfigError

if TYPE_CHECKING:
    from phalanx.simulate.policies.study import PolicyResult, StudyReport

File = Annotated[
    str,
    typer.Argument(
        metavar="FILE", help="Recorded jobs: columns of Philly, Helios, Acme or sacct -P."
    ),
]
Gpus = Annotated[int, typer.Option(min=1, help="GPUs that the jobs share.")]
NodeGpus = Annotated[int, typer.Option(min=1, help="GPUs in a node.")]
Skip = Annotated[int, typer.Option(min=0, help="Jobs left out at the beginning.")]
Jobs = Annotated[int, typer.Option(min=0, help="Jobs played; 0: all.")]
Limits = Annotated[
    float,
    typer.Option(
        min=0, help="Time limit of a job as a multiple of its run, where none is recorded; 0: none."
    ),
]
Faults = Annotated[
    str, typer.Option(metavar="MODEL", help="Nodes fail as in this model (simulate faults).")
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the failures.")]
Plot = Annotated[Path | None, typer.Option(help="Draw it: .png, .svg or .html.")]


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """What both commands take."""

    file: File
    gpus: Gpus = 512
    node_gpus: NodeGpus = 8
    skip: Skip = 0
    jobs: Jobs = 0
    limits: Limits = 1.0
    faults: Faults = ""
    seed: Seed = 0
    overrides: Set = None
    plot: Plot = None
    json: Json = False


@takes_options
def trace(options: TraceOptions) -> None:
    """Play a recorded trace under the default policy, or with --set queue.KEY=VALUE."""
    with exit_on_config_error(options.json):
        report = _studied(["default"], options)
    _shown(report, options, groups=True)


@takes_options
def policies(
    options: TraceOptions,
    policy: Annotated[
        list[str] | None, typer.Option(help="Only this one (repeatable); default: all.")
    ] = None,
) -> None:
    """Compare queue policies on a recorded trace, under the same failures."""
    from phalanx.simulate.policies.named import POLICIES

    with exit_on_config_error(options.json):
        report = _studied(policy or list(POLICIES), options)
    _shown(report, options, groups=False)


def _studied(names: list[str], options: TraceOptions) -> StudyReport:
    from phalanx.plan.show.plot import check_path
    from phalanx.simulate.policies.named import policy_named
    from phalanx.simulate.policies.study import TraceAsked, asked_trace, study

    if options.plot is not None:
        check_path(options.plot)
    for name in names:
        policy_named(name)
    for override in options.overrides or []:
        key = override.partition("=")[0].strip()
        if key in ("fleet.gpus", "fleet.node_gpus", "workload.file", "workload.limit_factor"):
            raise ConfigError("--set", override, "has an option of its own", "give that")
    asked = TraceAsked(
        file=options.file,
        gpus=options.gpus,
        node_gpus=options.node_gpus,
        skip=options.skip,
        jobs=options.jobs,
        limit_factor=options.limits,
        faults=options.faults,
        overrides=tuple(options.overrides or ()),
    )
    scenario, played = asked_trace(asked)

    def done(result: PolicyResult) -> None:
        if sys.stderr.isatty():
            print(f"{result.name}: {result.cpu_seconds:.1f} s", file=sys.stderr)

    return study(scenario, played, names, options.seed, done)


def _shown(report: StudyReport, options: TraceOptions, *, groups: bool) -> None:
    if options.plot is not None:
        from phalanx.simulate.show.policies import draw_study

        draw_study(report, options.plot)
    if options.json:
        print_json(report)
    else:
        from phalanx.cli.plan.policy_tables import print_study

        print_study(report, groups=groups)
        if options.plot is not None:
            print(f"wrote {options.plot}")
    if any(one.violations or one.refused or one.outcome.unfinished for one in report.policies):
        raise typer.Exit(1)
