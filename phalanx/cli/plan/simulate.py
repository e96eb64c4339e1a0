"""``phalanx simulate``: months of faults on a fleet, in seconds, through the real cluster core."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from typer.core import TyperGroup

from phalanx.cli.options import Json, Set
from phalanx.cli.output import exit_on_config_error, print_json
from phalanx.cli.plan.simulate_trace import policies, trace
from phalanx.cli.progress import working
from phalanx.config import ConfigError

if TYPE_CHECKING:
    from phalanx.simulate.result import SeedResult, SimulationReport
    from phalanx.simulate.scenario.scenario import Scenario

MOST_SEEDS = 10_000_000


class ScenarioGroup(TyperGroup):
    """``simulate NAME`` is short for ``simulate run NAME``."""

    # Any, because releases of Typer differ in whether these types are click's or their own.

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        if not args or args[0] not in self.commands:
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=ScenarioGroup, add_completion=False)
app.command()(trace)
app.command()(policies)

Name = Annotated[
    str, typer.Argument(metavar="SCENARIO", help="A scenario by name, or a TOML file of one.")
]
Gpus = Annotated[int | None, typer.Option(min=1, help="GPUs that jobs run on.")]
Days = Annotated[float | None, typer.Option(help="Length in days.")]
Seed = Annotated[int | None, typer.Option(min=0, help="One seed (default 0).")]
Seeds = Annotated[str, typer.Option(metavar="A:B", help="Seeds A to B - 1.")]
Processes = Annotated[int, typer.Option(min=1, help="Seeds to simulate in parallel.")]


@app.command(
    epilog="Also: phalanx simulate compare SCENARIO, trace FILE, policies FILE, list, "
    "show SCENARIO, keys [KEY], faults."
)
def run(
    scenario: Name,
    gpus: Gpus = None,
    days: Days = None,
    seed: Seed = None,
    seeds: Seeds = "",
    overrides: Set = None,
    json: Json = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the first seed: .png, .svg or .html.")
    ] = None,
    replay: Annotated[
        int | None, typer.Option(metavar="SEED", min=0, help="Print the event history of one seed.")
    ] = None,
    processes: Processes = 1,
) -> None:
    """Simulate a scenario with the real cluster core: faults, repairs, recoveries, GPU time."""
    from phalanx.simulate.scenario.load import load_scenario

    with exit_on_config_error(json):
        chosen = load_scenario(scenario, _changes(gpus, days, overrides))
        numbers = _numbers(seed, seeds)
        if plot is not None:
            from phalanx.plan.show.plot import check_path

            check_path(plot)
            if chosen.chaos is not None:
                raise ConfigError("--plot", str(plot), "chaos has no timeline", "try multi-tenant")
        if replay is not None:
            if seed is not None or seeds or plot is not None:
                rule = "tells of one seed and nothing else"
                raise ConfigError("--replay", replay, rule, "leave --seed, --seeds and --plot out")
            _replay(chosen, replay, json)
            return
        report = _run(chosen, numbers, processes, quiet=json)
        refuse_what_was_refused(chosen, report)
        if plot is not None:
            _draw(chosen, numbers[0], plot)
    if json:
        print_json(report)
    else:
        from phalanx.cli.plan.simulate_tables import print_report

        print_report(chosen, report)
        if plot is not None:
            print(f"wrote {plot}")
    if report.summary.violations or one_job_failed(chosen, report):
        raise typer.Exit(1)


@app.command()
def compare(
    scenario: Name,
    variant: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            metavar='"NAME: KEY=VALUE, …"',
            help="A variant to compare with the scenario (repeatable); default: those in its file.",
        ),
    ] = None,
    gpus: Gpus = None,
    days: Days = None,
    seed: Seed = None,
    seeds: Seeds = "",
    overrides: Set = None,
    json: Json = False,
    processes: Processes = 1,
) -> None:
    """Compare policies under the same faults."""
    from phalanx.simulate.scenario.load import load_scenario

    with exit_on_config_error(json):
        changes = _changes(gpus, days, overrides)
        base = load_scenario(scenario, changes)
        worlds = {base.name: ()} | dict(base.variants)
        if variant:
            worlds = {base.name: ()} | _variants(variant, base.name)
        if len(worlds) == 1:
            rule = "has no variants to compare with"
            fix = 'name one with --with "NAME: KEY=VALUE"; phalanx simulate keys lists keys'
            raise ConfigError("scenario", scenario, rule, fix)
        chosen = {name: load_scenario(scenario, [*changes, *more]) for name, more in worlds.items()}
        numbers = _numbers(seed, seeds)
        reports = {}
        for name, one in chosen.items():
            named = msgspec.structs.replace(one, name=name)
            reports[name] = _run(named, numbers, processes, quiet=json)
            refuse_what_was_refused(named, reports[name])
    if json:
        print_json({"variants": {name: one.summary for name, one in reports.items()}})
    else:
        from phalanx.cli.plan.simulate_tables import print_comparison

        print_comparison(chosen, reports)
    if any(
        report.summary.violations or one_job_failed(chosen[name], report)
        for name, report in reports.items()
    ):
        raise typer.Exit(1)


@app.command("list")
def list_scenarios(json: Json = False) -> None:
    """List the scenarios that come with Phalanx."""
    from phalanx.simulate.scenario.load import load_scenario, scenario_names

    scenarios = {name: load_scenario(name).about for name in scenario_names()}
    if json:
        print_json(scenarios)
        return
    for name, about in scenarios.items():
        print(f"{name:<14} {about}")


@app.command()
def show(
    scenario: Name,
    gpus: Gpus = None,
    days: Days = None,
    overrides: Set = None,
    json: Json = False,
) -> None:
    """Print a scenario as TOML, every key with its value."""
    from phalanx.config import to_toml
    from phalanx.simulate.scenario.load import load_scenario

    with exit_on_config_error(json):
        chosen = load_scenario(scenario, _changes(gpus, days, overrides))
    if json:
        print_json(chosen)
    else:
        print(to_toml(chosen), end="")


@app.command()
def keys(
    key: Annotated[str, typer.Argument(metavar="[KEY]", help="A key or a section.")] = "",
    json: Json = False,
) -> None:
    """List the settings of a scenario, with meaning and default."""
    from phalanx.config import explain
    from phalanx.simulate.scenario.scenario import Scenario

    with exit_on_config_error(json):
        docs = explain(key, Scenario)
    if json:
        print_json(docs)
        return
    for doc in docs:
        default = f" (default {doc.default})" if doc.default else ""
        print(f"{doc.key}: {doc.meaning}{default}")


@app.command()
def faults(json: Json = False) -> None:
    """List the fault models with rates and sources, and the kinds of gray faults."""
    from phalanx.simulate.scenario.fault_models import model, model_names, rate_of

    rows = [
        {
            "name": name,
            "per_1000_node_days": round(rate_of(model(name)), 3),
            "correlation": model(name).correlation,
            "about": model(name).about,
            "source": model(name).source,
            "assumed": model(name).assumed,
        }
        for name in model_names()
    ]
    from phalanx.simulate.scenario.chaos_faults import KINDS

    if json:
        print_json({"models": rows, "gray": KINDS})
        return
    for row in rows:
        print(f"{row['name']}: {row['about']}")
        rate, known = row["per_1000_node_days"], row["correlation"]
        print(f"    {rate} per 1000 node-days, faults of whole domains {known}")
        print(f"    source: {row['source']}\n    assumed: {row['assumed']}")
    print("\ngray faults of chaos:")
    for kind, about in KINDS.items():
        print(f"    {kind}: {about}")


def _changes(gpus: int | None, days: float | None, overrides: list[str] | None) -> list[str]:
    changes = list(overrides or [])
    for flag, key, value in (("--gpus", "fleet.gpus", gpus), ("--days", "days", days)):
        if value is None:
            continue
        for override in overrides or []:
            if override.partition("=")[0].strip() == key:
                rule = f"says the same as --set {override}"
                raise ConfigError(flag, value, rule, "leave one of them out")
        changes.append(f"{key}={value}")
    return changes


def _numbers(seed: int | None, seeds: str) -> range:
    if not seeds:
        return range(seed or 0, (seed or 0) + 1)
    if seed is not None:
        rule = "cannot be given together with --seeds"
        raise ConfigError("--seed", seed, rule, "leave one of them out")
    first, colon, last = seeds.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise ConfigError("--seeds", seeds, "must be A:B with A below B", "e.g. --seeds 0:20")
    if int(last) - int(first) > MOST_SEEDS:
        raise ConfigError("--seeds", seeds, f"are more than {MOST_SEEDS}", "take fewer")
    return range(int(first), int(last))


def _variants(texts: list[str], base: str) -> dict[str, tuple[str, ...]]:
    variants: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, changes = _variant(text)
        if name == base or name in variants:
            rule = f'there is a world of the name "{name}" already'
            raise ConfigError("--with", text, rule, "give each a name of its own")
        variants[name] = changes
    return variants


def _variant(text: str) -> tuple[str, tuple[str, ...]]:
    name, colon, changes = text.partition(":")
    settings = tuple(change.strip() for change in changes.split(",") if change.strip())
    if not (colon and name.strip() and settings):
        fix = 'e.g. --with "no spares: fleet.spare_nodes=0"'
        raise ConfigError("--with", text, 'must be "NAME: KEY=VALUE, …"', fix)
    return name.strip(), settings


def _run(scenario: Scenario, seeds: range, processes: int, quiet: bool) -> Any:
    from phalanx.simulate.runner import run_seeds

    ended = 0
    processes = min(processes, os.cpu_count() or 1)
    with working(f"simulate {scenario.name}", quiet) as passed:

        def done(_: SeedResult) -> None:
            nonlocal ended
            ended += 1
            passed(ended / len(seeds))

        return run_seeds(scenario, seeds, processes, done, passed)


def refuse_what_was_refused(scenario: Scenario, report: SimulationReport) -> None:
    """A scenario's one job that the core does not accept is a mistake in the scenario."""
    for one in report.seeds if scenario.workload.kind == "one-job" else ():
        _refuse(scenario, one.refused)


def _refuse(scenario: Scenario, refused: Iterable[str]) -> None:
    for why in refused:
        rule = f"the core does not accept the job: {why}"
        raise ConfigError("job", scenario.name, rule, "change job.* or fleet.*")


def one_job_failed(scenario: Scenario, report: SimulationReport) -> bool:
    """Whether a scenario's one job ended before its time."""
    return scenario.workload.kind == "one-job" and any(one.failed for one in report.seeds)


def _replay(scenario: Scenario, seed: int, json: bool) -> None:
    from phalanx.simulate.show.replay import story_of

    story = story_of(scenario, seed)
    one_job = scenario.workload.kind == "one-job"
    if one_job:
        _refuse(scenario, story.refused)
    if json:
        print_json(story)
    else:
        print("\n".join([*story.story, *(story.failures if one_job else [])]))
    if story.violations or (one_job and story.failures):
        raise typer.Exit(1)


def _draw(scenario: Scenario, seed: int, path: Path) -> None:
    from phalanx.simulate.show.plot import draw_seed

    draw_seed(scenario, seed, path)
