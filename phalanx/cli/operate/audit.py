"""``phalanx audit``: who asked the server for what, and the proof that nothing is missing."""

from __future__ import annotations

from collections import deque
from datetime import UTC, datetime
from typing import Annotated

import typer

from phalanx.cli.connection import REFUSED
from phalanx.cli.options import Json, State
from phalanx.cli.output import fail, print_json

app = typer.Typer(help="Show the audit log of a server on this machine, or verify its integrity.")


@app.callback(invoke_without_command=True)
def audit(
    ctx: typer.Context,
    last: Annotated[int, typer.Option(min=1, help="Number of lines from the end.")] = 50,
    name: Annotated[str, typer.Option(help="Only of this token's name.")] = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Show the newest lines of the audit log in a server's state folder."""
    if ctx.invoked_subcommand is not None:
        return
    import msgspec

    from phalanx.control.client.client import default_state
    from phalanx.control.server.security.audit_check import entries

    try:
        kept = (each for each in entries(state or default_state()) if name in ("", each.name))
        newest = list(deque(kept, maxlen=last))
    except OSError as error:
        fail(f"the audit log cannot be read: {error.filename}: {error.strerror}", REFUSED)
    if not newest and not name:
        where = state or default_state()
        fail(f"{where} has no audit log: name a server's state folder with --state", REFUSED)
    if json:
        print_json(msgspec.to_builtins(newest))
        return
    for each in newest:
        at = datetime.fromtimestamp(each.time_ns / 1e9, UTC)
        who = each.name or each.client or "-"
        times = f" x{each.count}" if each.count > 1 else ""
        print(f"{at:%Y-%m-%d %H:%M:%S} {who} {each.action} {each.status}{times} {each.detail}")


@app.command()
def verify(
    head: Annotated[
        str, typer.Option(help="Hash of a line, recorded elsewhere, that must still be in the log.")
    ] = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Verify that no line was changed, removed or cut off; exit with 1 and the first that was."""
    import msgspec

    from phalanx.control.client.client import default_state
    from phalanx.control.server.security.audit_check import verify as follow

    try:
        proof = follow(state or default_state(), head)
    except OSError as error:
        fail(f"the audit log cannot be read: {error.filename}: {error.strerror}", REFUSED)
    if json:
        print_json(msgspec.to_builtins(proof))
    elif proof.problem:
        print(f"broken at line {proof.broken}: {proof.problem}")
    else:
        print(f"whole: lines {proof.first} to {proof.last}, head {proof.head}")
    if proof.problem:
        raise typer.Exit(REFUSED)
