"""``phalanx what-if``: what a change would make of a job that runs; nothing is carried out."""

from __future__ import annotations

import typer

from phalanx.cli.connection import connected
from phalanx.cli.jobs.change_options import ChangeOptions
from phalanx.cli.option_struct import takes_options
from phalanx.cli.options import Json, ServerUrl, State
from phalanx.cli.output import exit_on_config_error, print_json
from phalanx.cli.tables import add_row, plain, print_table, table
from phalanx.plan.cost.money import Range
from phalanx.plan.search.stage_change import StagesAnswer
from phalanx.plan.search.what_if import JobOutcome, WhatIf

app = typer.Typer()


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
