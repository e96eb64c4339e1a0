"""``phalanx server``: what a server that does not run may need."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.connection import REFUSED
from phalanx.cli.options import Json, State
from phalanx.cli.output import exit_on, print_json
from phalanx.cli.progress import working

if TYPE_CHECKING:
    from phalanx.control.server.store.check import ExaminedLog
    from phalanx.control.server.store.takeover import SqlStore

app = typer.Typer(no_args_is_help=True, help="Maintain a stopped server's event log.")


@app.callback()
def server() -> None:
    """A group, also while it has one command only."""


@app.command()
def repair(
    truncate_after: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Discard every event after event N."),
    ] = None,
    set_aside: Annotated[
        list[int] | None,
        typer.Option(min=1, metavar="N", help="Discard only damaged event N (repeatable)."),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Carry it out; without it, only show what would be lost.")
    ] = False,
    store: Annotated[str, typer.Option(help="postgresql://… as `up` has it.")] = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Check a stopped server's event log, or deliberately discard its damaged parts.

    Without options nothing is changed. Ends with 1 where the log is (still) damaged.
    """
    from phalanx.control.client.client import default_state
    from phalanx.control.server.store.interface import StoreError, open_store
    from phalanx.control.server.store.takeover import SqlStore

    if truncate_after is not None and set_aside:
        raise typer.BadParameter("give --truncate-after or --set-aside")
    folder = state or default_state()
    with exit_on(StoreError, code=REFUSED):
        log = open_store(store, folder)
        assert isinstance(log, SqlStore)
        try:
            with working("check the log", json):
                examined = log.examined()
            if examined.findings and not log.stored_format():
                raise StoreError(
                    f"{examined.findings[0]}, and nothing is left that could be repaired: restore "
                    "a backup (docs/how-to/back-up-and-restore.md), or move the files log.* of "
                    f"{folder} away to begin without any job or node"
                )
            if truncate_after is None and not set_aside:
                _show(log, examined, json)
            else:
                _act(log, examined, truncate_after, set_aside or [], yes)
        finally:
            log.close()


def _show(log: SqlStore, examined: ExaminedLog, json: bool) -> None:
    from phalanx.control.server.store.repair import as_json, job_made_by, lone_events, loss_of

    if json:
        import msgspec

        print_json(msgspec.json.decode(as_json(examined)))
    elif not examined.findings:
        print(f"the log is sound: {examined.sequence} events")
    else:
        for each in examined.findings:
            print(f"damage: {each}")
        loss = loss_of(log, examined.sound + 1, examined.acknowledged)
        print(f"`--truncate-after {examined.sound}` would go on from there; it loses {loss}")
        if examined.keys.damaged:
            print(f"with it go damaged tokens or secrets: {', '.join(examined.keys.damaged)}")
        alone = lone_events(examined)
        if alone and not any(job_made_by(log, each) for each in alone):
            options = " ".join(f"--set-aside {each}" for each in alone)
            print(f"`{options}` would go on with all but {len(alone)} event(s)")
        print("a backup that holds them is better: docs/how-to/back-up-and-restore.md")
    if examined.findings:
        raise typer.Exit(REFUSED)


def _act(
    log: SqlStore, examined: ExaminedLog, truncate_after: int | None, aside: list[int], yes: bool
) -> None:
    from phalanx.control.server.store.repair import loss_of, set_aside, truncate

    if truncate_after is not None:
        what = str(loss_of(log, truncate_after + 1, examined.acknowledged))
    else:
        what = f"event {', '.join(map(str, aside))}"
    if not yes:
        print(f"this would lose {what}; nothing was changed: add --yes to do it")
        raise typer.Exit(REFUSED)
    if truncate_after is not None:
        kept = truncate(log, truncate_after)
    else:
        kept = set_aside(log, aside)
    left = log.examined().findings
    print(f"lost: {what}")
    if kept:
        print(f"the files as they were: {kept}")
    for each in left:
        print(f"damage: {each}")
    if left:
        raise typer.Exit(REFUSED)
    print("the log is sound: `phalanx up` starts it")
