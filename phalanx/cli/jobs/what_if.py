"""``phalanx what-if``: what a change would make of a job that runs; nothing is carried out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from phalanx.cli.connection import connected
from phalanx.cli.option_struct import takes_options
from phalanx.cli.options import JobNumber, Json, ServerUrl, Set, State
from phalanx.cli.output import print_json
from phalanx.cli.tables import add_row, plain, print_table, table
from phalanx.plan.cost.money import Range
from phalanx.plan.search.what_if import JobChange, JobOutcome, WhatIf

app = typer.Typer()


@dataclass(frozen=True, kw_only=True)
class ChangeOptions:
    """What ``phalanx what-if`` and ``replan`` would change of a job."""

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

    def change(self) -> JobChange:
        """The change as the server takes it."""
        return JobChange(
            settings=tuple(self.overrides or ()),
            gpus=self.gpus,
            interval_seconds=self.interval,
            spares=self.spares,
            precision=self.precision,
            search=self.search,
        )


@app.command()
@takes_options
def what_if(
    options: ChangeOptions,
    job: JobNumber,
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Estimate what a change would do to a job: step, MFU, hours, dollars, goodput, now and then.

    The job's own steps calibrate the answer. Nothing is carried out: `phalanx replan` does that.
    """
    with connected(server, json, state) as client:
        answer = client.post(f"/v1/jobs/{job}/what-if", options.change(), WhatIf)
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
    if answer.changed:
        print(plain(f"changed: {', '.join(answer.changed)}"))
    if answer.calibration != 1:
        print(
            f"its steps take {answer.calibration:.2f} times what is predicted: so does the change"
        )


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
