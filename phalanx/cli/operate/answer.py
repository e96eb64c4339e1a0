"""``phalanx answer``: decide what only a person may decide."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.connection import connected, exit_on_server_error, print_done
from phalanx.cli.options import Json, ServerUrl, State
from phalanx.cli.output import exit_on, exit_on_config_error, print_json
from phalanx.cli.tables import add_row, print_table, table, when
from phalanx.control.wire.api_types import Decision, Done, Status

app = typer.Typer()


@app.command()
def answer(
    question: Annotated[
        str, typer.Argument(help="Number of the question; for a pipeline, the name of the step.")
    ] = "",
    take_out: Annotated[
        bool | None,
        typer.Option("--take-out/--keep", help="Take the nodes out of service, or keep them."),
    ] = None,
    pipeline: Annotated[Path | None, typer.Option(help="File of the pipeline.")] = None,
    approve: Annotated[
        bool | None,
        typer.Option("--approve/--reject", help="Approve or reject the pipeline's step."),
    ] = None,
    why: Annotated[str, typer.Option(help="Reason shown to others.")] = "",
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """List questions that need a person's decision, or answer one (NUMBER --take-out or --keep).

    For a pipeline's step: STEP --pipeline PIPELINE.toml --approve (or --reject).
    """
    if pipeline is not None or approve is not None:
        _answer_pipeline(pipeline, question, approve, why, server, json)
        return
    if question and not question.isdigit():
        raise typer.BadParameter(f"{question} is no number; a pipeline's step needs --pipeline")
    if bool(question) != (take_out is not None):
        raise typer.BadParameter("give a number with --take-out or --keep, or neither to list them")
    with connected(server, json, state) as client:
        if take_out is not None:
            done = client.post(
                f"/v1/questions/{question}", Decision(approve=take_out, why=why), Done
            )
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


def _answer_pipeline(
    path: Path | None, step: str, approve: bool | None, why: str, server: str, json: bool
) -> None:
    from phalanx.pipelines.cluster.session import served_pipeline
    from phalanx.pipelines.run.record import RecordError
    from phalanx.pipelines.run.session import recorded_pipeline
    from phalanx.pipelines.run.workspace import WorkspaceError

    if path is None or bool(step) != (approve is not None):
        rule = "give STEP, --pipeline PIPELINE.toml and --approve or --reject; no STEP lists them"
        raise typer.BadParameter(rule)
    with (
        exit_on_config_error(json),
        exit_on_server_error(json),
        exit_on(WorkspaceError, RecordError),
    ):
        session = served_pipeline(path, server) if server else recorded_pipeline(path)
        if approve is not None:
            text = session.answer(step, approve, why)
            print_json({"message": text}) if json else print(text)
            if not server and not json:
                print(f"  next: phalanx pipeline resume {path}")
            return
        asked = session.questions()
    if json:
        print_json(asked)
        return
    made = table("STEP", "QUESTION")
    for name, text in asked.items():
        add_row(made, name, text)
    print_table(made) if asked else print("nothing waits for a person's word")
