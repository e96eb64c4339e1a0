"""``phalanx eval``: score a checkpoint on tasks and on texts of domains."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.checkpoints.model_options import ModelOptions, exit_on_evaluation_error
from phalanx.cli.option_struct import takes_options
from phalanx.cli.options import Json
from phalanx.cli.output import exit_on, exit_on_config_error, print_json, refuse_unwritable
from phalanx.cli.progress import working
from phalanx.cli.tables import add_row, print_table, table

if TYPE_CHECKING:
    from phalanx.train.evaluate.scores import Scores

app = typer.Typer()


@dataclass(frozen=True)
class EvalOptions(ModelOptions):
    """What is scored."""

    tasks: Annotated[
        list[str] | None,
        typer.Option(help="Task of lm-evaluation-harness (repeatable, or several with commas)."),
    ] = None
    task_folder: Annotated[
        Path | None, typer.Option(exists=True, help="Folder of task files of your own.")
    ] = None
    few_shot: Annotated[
        int | None, typer.Option(min=0, help="Solved samples before each (default: the task's).")
    ] = None
    perplexity: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PATH", help="Token shards or text of a domain (repeatable)."),
    ] = None
    limit: Annotated[
        int, typer.Option(min=0, help="Only the first so many samples or documents; 0: all.")
    ] = 0
    out: Annotated[Path | None, typer.Option(help="Write the scores into this JSON file.")] = None
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", help="Score every checkpoint of a run as it appears, until the run ends."
        ),
    ] = False

    def domains(self) -> dict[str, str]:
        """Paths by name."""
        named = [each.partition("=") for each in self.perplexity or []]
        for name, _, path in named:
            if not (name and path):
                raise typer.BadParameter("is NAME=PATH", param_hint="--perplexity")
        return {name: path for name, _, path in named}


@app.command("eval")
@takes_options
def evaluate(options: EvalOptions, json: Json = False) -> None:
    """Score a checkpoint as it is: lm-evaluation-harness tasks, perplexity by domain."""
    domains = options.domains()
    tasks = tuple(name for each in options.tasks or [] for name in each.split(",") if name)
    if not (tasks or domains):
        raise typer.BadParameter("name --tasks, or --perplexity NAME=PATH", param_hint="--tasks")
    if options.out is not None and options.out.parent.exists():  # else it is made
        refuse_unwritable(options.out, "--out")
    model_place = options.place()
    from phalanx.train.evaluate.plan import EvaluationPlan
    from phalanx.train.evaluate.run import evaluate_checkpoint
    from phalanx.train.evaluate.watch import watch_run

    plan = EvaluationPlan(
        tasks=tasks,
        task_folder=str(options.task_folder or ""),
        few_shot=options.few_shot,
        perplexity=domains,
        limit=options.limit,
    )
    with exit_on_config_error(json), exit_on_evaluation_error(json), exit_on(OSError):
        if options.watch:
            watch_run(model_place, plan, lambda scores: _show(scores, options.out, json))
            return
        with working("evaluate", json):
            scores = evaluate_checkpoint(model_place, plan)
        _show(scores, options.out, json)
    raise typer.Exit(1 if scores.problems else 0)


def _show(scores: Scores, out: Path | None, json: bool) -> None:
    """To the terminal and, where one is named, into a file."""
    from phalanx.train.evaluate.scores import write_scores

    if out is not None:
        write_scores(out, scores)
    if json:
        print_json(scores)
        return
    which = ", the average of its weights" if scores.average else ""
    print(f"{scores.checkpoint}, step {scores.step}{which}")
    shown = table("score", "value")
    for name, value in scores.scores.items():
        add_row(shown, name, f"{value:,.0f}" if value == int(value) else f"{value:.6g}")
    print_table(shown)
    for name, problem in scores.problems.items():
        print(f"not scored: {name}: {problem}")
    sys.stdout.flush()
