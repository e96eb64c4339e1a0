"""``phalanx replan``: another mapping, or other stages, for a job that runs, at a step boundary."""

from __future__ import annotations

from typing import Annotated

import typer
from msgspec import structs

from phalanx.cli.connection import connected, print_done
from phalanx.cli.jobs.what_if import ChangeOptions, print_answer
from phalanx.cli.option_struct import takes_options
from phalanx.cli.options import Json, ServerUrl, State
from phalanx.cli.output import exit_on_config_error, print_json
from phalanx.cli.queue.job_orders import Why
from phalanx.control.wire.api_types import Done
from phalanx.plan.search.what_if import WhatIf

app = typer.Typer()


@app.command()
@takes_options
def replan(
    options: ChangeOptions,
    apply: Annotated[bool, typer.Option("--apply", help="Carry it out.")] = False,
    why: Why = "",
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Change the mapping or the stages of a running job at a step boundary, without losing a step.

    Without --apply it only shows the estimate. A mapping that cannot be placed or does not fit into
    memory, and a stage that would alter a step that is made, is refused before anything stops.
    """
    with exit_on_config_error(json):
        change = options.change()
    with connected(server, json, state) as client:
        answer = client.post(f"/v1/jobs/{options.job}/what-if", change, WhatIf)
        if not json:
            print_answer(answer)
        elif not apply:
            print_json(answer)
        if apply:
            body = structs.asdict(change) | {"why": why}
            done = client.post(f"/v1/jobs/{options.job}/replan", body, Done)
            print_done(f"job {options.job}", done, json)
