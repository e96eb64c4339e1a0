"""``phalanx fleet``: agents onto hosts of one's own, over SSH."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Annotated

import typer

from phalanx import __version__
from phalanx.cli.connection import connected
from phalanx.cli.options import Json, ServerUrl, State
from phalanx.cli.output import exit_on_config_error, print_json

app = typer.Typer(no_args_is_help=True, help="Hosts of one's own: agents as services, over SSH.")


@app.callback()
def root() -> None:
    """Hosts of one's own: agents as services, over SSH."""


@app.command()
def add(
    hosts: Annotated[Path, typer.Argument(help="File: [user@]address[:port] [name] a line.")],
    url: Annotated[str, typer.Option(help="Server, as the hosts reach it.")],
    folder: Annotated[str, typer.Option(help="Where it is installed there.")] = "/opt/phalanx",
    python: Annotated[str, typer.Option(help="Python there, 3.11 or newer.")] = "python3",
    install: Annotated[
        str, typer.Option(help="Shell that installs phalanx into $folder/venv (default: pip).")
    ] = "",
    agent_options: Annotated[str, typer.Option(help="More options for the agents.")] = "",
    ca: Annotated[str, typer.Option(help="File of the server's authority, on the hosts.")] = "",
    fingerprint: Annotated[
        str, typer.Option(help="Of the server's own authority, as `phalanx up` prints it.")
    ] = "",
    ssh: Annotated[str, typer.Option(help="Program and options, e.g. 'ssh -J jump'.")] = "ssh",
    parallel: Annotated[int, typer.Option(min=1, max=256, help="Hosts at a time.")] = 8,
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Install or upgrade agents, a few at a time; run it again to go on where it broke off.

    Jobs are not stopped: workers outlive their agent, and the new one adopts them.
    """
    from phalanx.control.backends.bare.rollout import Outcome, Rollout, read_hosts
    from phalanx.control.backends.bare.unit import InstallOptions
    from phalanx.control.wire.api_types import NewToken, NodeList, TokenIn

    with exit_on_config_error(json):
        found = read_hosts(_text(hosts))
    with connected(server, json, state) as client:
        token = client.post(
            "/v1/tokens", TokenIn(name="fleet-add", role="agent", hours=24.0), NewToken
        ).secret
        options = InstallOptions(
            url=url,
            token=token,
            version=__version__,
            folder=folder,
            python=python,
            install=install,
            ca=ca,
            fingerprint=fingerprint,
            options=agent_options,
            ssh=ssh,
        )
        digest = hashlib.blake2b(url.encode(), digest_size=6).hexdigest()
        memory = Path.home() / ".phalanx" / "fleet" / f"{digest}.json"

        def joined() -> list[str]:
            nodes = client.get("/v1/nodes", NodeList, limit=20_000).nodes
            return [node.name for node in nodes if node.connected]

        def told(outcome: Outcome) -> None:
            if not json:
                print(f"{outcome.host}: {outcome.state} {outcome.detail}".rstrip(), flush=True)

        outcomes = Rollout(options, memory, joined).run(found, parallel, told)
    failed = [outcome for outcome in outcomes if outcome.state == "failed"]
    if json:
        print_json(outcomes)
    else:
        print(f"{len(outcomes) - len(failed)} of {len(outcomes)} hosts are ready")
    raise typer.Exit(1 if failed else 0)


def _text(path: Path) -> str:
    from phalanx.config import ConfigError

    try:
        return path.read_text()
    except OSError as error:
        reason = error.strerror or os.strerror(error.errno or 0)
        raise ConfigError("hosts", str(path), reason, "name a file of hosts") from None
