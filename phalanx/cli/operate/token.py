"""``phalanx token``: who may speak to the server."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.connection import connected
from phalanx.cli.options import Json, ServerUrl, State
from phalanx.cli.output import fail, print_json
from phalanx.cli.tables import add_row, print_table, table, when
from phalanx.control.trust.secret_file import write_secret
from phalanx.control.wire.api_types import NewToken, TokenIn, TokenList, Whoami

app = typer.Typer(no_args_is_help=True, help="Create, list and revoke access tokens.")


class RoleName(StrEnum):
    """What a token allows."""

    admin = "admin"
    user = "user"
    read = "read"
    agent = "agent"


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="Name of the person or program that will use it.")],
    role: Annotated[RoleName, typer.Option(help="agent: a token that agents join with.")],
    out: Annotated[
        Path | None, typer.Option(help="Write it to this file, readable by you alone.")
    ] = None,
    team: Annotated[str, typer.Option(help="Team of a user, or all that a reader sees.")] = "",
    hours: Annotated[float, typer.Option(min=0, help="Until it expires (agent: 24).")] = 0.0,
    uses: Annotated[
        int, typer.Option(min=0, help="agent: nodes that may join with it; 0: any number.")
    ] = 0,
    network: Annotated[
        str, typer.Option(help="agent: network that nodes may join from, e.g. 10.0.0.0/8.")
    ] = "",
    approves: Annotated[
        bool,
        typer.Option(help="agent: admit nodes at once, or only after `phalanx nodes approve`."),
    ] = True,
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Create a token; it is shown only once."""
    with connected(server, json, state) as client:
        body = TokenIn(
            name=name,
            role=role.value,
            team=team,
            hours=hours,
            uses=uses,
            network=network,
            approves=approves,
        )
        made = client.post("/v1/tokens", body, NewToken)
        try:
            if out is not None:
                write_secret(out, made.secret)
        except OSError as error:  # a token that nobody has would be good for ever
            client.delete(f"/v1/tokens/{made.token.id}", Whoami)
            fail(f"no token is made: {out}: {error.strerror}")
    if json:
        print_json(made if out is None else made.token)
        return
    until = f"until {when(made.token.expires_ns)}" if made.token.expires_ns else "without an end"
    told = f"written to {out}" if out else made.secret
    print(f"token {made.token.id} for {name} ({made.token.role}), good {until}:\n{told}")


@app.command("list")
def list_tokens(server: ServerUrl = "", state: State = None, json: Json = False) -> None:
    """List tokens (without their secrets)."""
    with connected(server, json, state) as client:
        listed = client.get("/v1/tokens", TokenList)
    if json:
        print_json(listed)
        return
    made = table("ID", "NAME", "ROLE", "TEAM", "NODE", "MADE", "EXPIRES", "")
    for token in listed.tokens:
        times = when(token.created_ns), when(token.expires_ns) or "never"
        revoked = "revoked" if token.revoked else ""
        add_row(made, token.id, token.name, token.role, token.team, token.node, *times, revoked)
    print_table(made)


@app.command()
def revoke(
    token: Annotated[str, typer.Argument(help="Its id, as listed.")],
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Revoke a token."""
    with connected(server, json, state) as client:
        done = client.delete(f"/v1/tokens/{token}", Whoami)
    if json:
        print_json(done)
    else:
        print(f"token {token} ({done.token.name}) is revoked")
