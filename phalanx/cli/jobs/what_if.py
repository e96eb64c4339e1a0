"""``phalanx what-if``: what a change would make of a job that runs; nothing is carried out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from phalanx.cli.connection import connected
from phalanx.cli.option_struct import takes_options
from phalanx.cli.options import JobNumber, Json, ServerUrl, Set, State
from phalanx.cli.output import exit_on_config_error, print_json
from phalanx.cli.tables import add_row, plain, print_table, table
from phalanx.config import ConfigError, StageEdit
from phalanx.plan.cost.money import Range
from phalanx.plan.search.stage_change import StagesAnswer
from phalanx.plan.search.what_if import JobChange, JobOutcome, WhatIf

app = typer.Typer()


@dataclass(frozen=True, kw_only=True)
class ChangeOptions:
    """A job, and what is to be otherwise."""

    job: JobNumber
    overrides: Set = None
    gpus: Annotated[int, typer.Option(min=0, help="GPUs; 0: as many as now.")] = 0
    interval: Annotated[
        float, typer.Option(min=0, help="Seconds between checkpoints; 0: as now.")
    ] = 0.0
    spares: Annotated[int, typer.Option(min=-1, help="Spare nodes; -1: as now.")] = -1
    precision: Annotated[
        Literal["", "float32", "float16", "bfloat16", "fp8"], typer.Option(help="Number format.")
    ] = ""
    search: Annotated[bool, typer.Option("--search", help="Search for the best mapping.")] = False
    after_step: Annotated[
        int,
        typer.Option(
            metavar="STEP",
            min=0,
            help="Step after which a stage begins, for the next options; 0: as soon as is safe.",
        ),
    ] = 0
    weight: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SOURCE=SHARE",
            help="Weight of a source of the blend (repeatable); others are not drawn from.",
        ),
    ] = None
    sequence: Annotated[int, typer.Option(min=0, help="Tokens in a sample.")] = 0
    global_batch: Annotated[int, typer.Option(min=0, help="Samples in a step.")] = 0
    micro_batch: Annotated[int, typer.Option(min=0, help="Samples in one forward pass.")] = 0
    rope_scaling: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Setting of model.rope_scaling (repeatable)."),
    ] = None
    remove: Annotated[
        bool, typer.Option("--remove", help="Remove the stages that begin after that step.")
    ] = False
    undo: Annotated[
        bool, typer.Option("--undo", help="Put back the stages of before they were changed last.")
    ] = False

    def change(self) -> JobChange:
        """What is asked for; ``ConfigError`` where a weight is none."""
        return JobChange(
            settings=tuple(self.overrides or ()),
            gpus=self.gpus,
            interval_seconds=self.interval,
            spares=self.spares,
            precision=self.precision,
            search=self.search,
            stage=self._stage(),
            undo=self.undo,
        )

    def _stage(self) -> StageEdit | None:
        edit = StageEdit(
            after_step=self.after_step,
            weights=dict(_weight(each) for each in self.weight or ()),
            sequence=self.sequence,
            global_batch=self.global_batch,
            micro_batch=self.micro_batch,
            rope_scaling=tuple(self.rope_scaling or ()),
            remove=self.remove,
        )
        return None if edit == StageEdit(after_step=0) else edit


def _weight(text: str) -> tuple[str, float]:
    name, _, share = text.partition("=")
    try:
        return name, float(share)
    except ValueError:
        fix = "e.g. --weight code=0.3 --weight web=0.7"
        raise ConfigError("--weight", text, "must be SOURCE=SHARE", fix) from None


@app.command()
@takes_options
def what_if(
    options: ChangeOptions,
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Estimate what a change would do to a job: step, MFU, hours, dollars, goodput, now and then.

    The job's own steps calibrate the answer. Nothing is carried out: `phalanx replan` does that.
    """
    with exit_on_config_error(json):
        change = options.change()
    with connected(server, json, state) as client:
        answer = client.post(f"/v1/jobs/{options.job}/what-if", change, WhatIf)
    if json:
        print_json(answer)
    else:
        print_answer(answer)


def print_answer(answer: WhatIf) -> None:
    """Now and then, side by side."""
    made = table("", "NOW", "THEN")
    now, then = _cells(answer.now), _cells(answer.then)
    for name, text in now.items():
        add_row(made, name, text, then[name])
    print_table(made)
    if answer.stages is not None:
        _print_stages(answer.stages)
    elif answer.changed:
        print(plain(f"changed: {', '.join(answer.changed)}"))
    if answer.calibration != 1:
        print(
            f"its steps take {answer.calibration:.2f} times what is predicted: so does the change"
        )


def _print_stages(answer: StagesAnswer) -> None:
    """What is read when, beside what would be."""
    now, then = ({row.after_step: row for row in rows} for rows in (answer.now, answer.then))
    made = table("AFTER STEP", "NOW", "THEN")
    for step in sorted({*now, *then}):
        before, after = (str(rows[step]) if step in rows else "" for rows in (now, then))
        add_row(made, f"{step:,}", before, after if after != before else "as now")
    print_table(made)
    print(_effect(answer))


def _effect(answer: StagesAnswer) -> str:
    if answer.made_before < 0:
        return "no step reads anything else"
    if answer.made_before < answer.safe:
        return (
            f"step {answer.made_before + 1:,} would be the first to differ, and may be made before"
            f" the gang has stopped: after step {answer.safe:,} is safe"
        )
    return f"all steps up to {answer.made_before:,} stay as they are"


def _cells(outcome: JobOutcome) -> dict[str, str]:
    return {
        "mapping": outcome.mapping,
        "GPUs": f"{outcome.gpus:,}",
        "step s": _between(outcome.step_seconds),
        "tokens/s": f"{outcome.tokens_per_second:,.0f}",
        "MFU": f"{outcome.mfu:.1%}",
        "goodput": f"{outcome.goodput:.1%}",
        "hours left": _between(outcome.hours),
        "dollars": _between(outcome.dollars),
        "GiB a GPU": f"{outcome.memory_bytes / 2**30:.1f} of {outcome.memory_limit / 2**30:.0f}",
    }


def _between(value: Range) -> str:
    return f"{value.mid:,.3g} ({value.low:,.3g} to {value.high:,.3g})"
