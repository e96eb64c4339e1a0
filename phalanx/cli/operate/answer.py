"""``phalanx answer``: decide what only a person may decide."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.cli.connection import connected, print_done
from phalanx.cli.options import Json, ServerUrl, State
from phalanx.cli.output import print_json
from phalanx.cli.tables import add_row, print_table, table, when
from phalanx.control.wire.api_types import Decision, Done, Status

app = typer.Typer()


@app.command()
def answer(
    question: Annotated[int, typer.Argument(min=0, help="Its number.")] = 0,
    take_out: Annotated[
        bool | None, typer.Option("--take-out/--keep", help="What becomes of the nodes.")
    ] = None,
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Show what a person must decide, or decide it (NUMBER --take-out, or --keep)."""
    if bool(question) != (take_out is not None):
        raise typer.BadParameter("give a number with --take-out or --keep, or neither to list them")
    with connected(server, json, state) as client:
        if take_out is not None:
            done = client.post(f"/v1/questions/{question}", Decision(approve=take_out), Done)
            print_done(f"question {question}", done, json)
            return
        questions = client.get("/v1/status", Status).questions
    if json:
        print_json(questions)
        return
    made = table("QUESTION", "SINCE", "ABOUT", "CAUSES", "NODES")
    for each in questions:
        causes = ", ".join(dict.fromkeys(each.causes))
        named = ", ".join(each.nodes[:8]) + (" …" if len(each.nodes) > 8 else "")
        about = f"{each.about} of {len(each.nodes)} nodes"
        add_row(made, each.question, when(each.asked_ns), about, causes, named)
    print_table(made) if questions else print("nothing waits for a person's word")
