"""``phalanx fleet``: agents onto hosts of one's own, over SSH."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx import __version__
from phalanx.cli.connection import connected
from phalanx.cli.option_struct import takes_options
from phalanx.cli.options import Json, ServerUrl, State
from phalanx.cli.output import exit_on_config_error, print_json

if TYPE_CHECKING:
    from phalanx.control.backends.bare.unit import InstallOptions

app = typer.Typer(
    no_args_is_help=True, help="Install agents as services on your own hosts over SSH."
)


@app.callback()
def root() -> None:
    """Install agents as services on your own hosts over SSH."""


@dataclass(frozen=True, kw_only=True)
class AddOptions:
    """What ``phalanx fleet add`` is asked for."""

    hosts: Annotated[
        Path, typer.Argument(help="File: [user@]address[:port] [name] [leaf=…] a line.")
    ]
    url: Annotated[str, typer.Option(help="Server, as the hosts reach it.")]
    folder: Annotated[str, typer.Option(help="Where it is installed there.")] = "/opt/phalanx"
    python: Annotated[str, typer.Option(help="Python there, 3.11 or newer.")] = "python3"
    install: Annotated[
        str, typer.Option(help="Shell that installs phalanx into $folder/venv (default: pip).")
    ] = ""
    agent_options: Annotated[str, typer.Option(help="More options for the agents.")] = ""
    ca: Annotated[str, typer.Option(help="File of the server's authority, on the hosts.")] = ""
    fingerprint: Annotated[
        str, typer.Option(help="Fingerprint of the server's own CA, as `phalanx up` prints it.")
    ] = ""
    ssh: Annotated[str, typer.Option(help="Program and options, e.g. 'ssh -J jump'.")] = "ssh"
    parallel: Annotated[int, typer.Option(min=1, max=256, help="Hosts at a time.")] = 8

    def install_options(self, token: str) -> InstallOptions:
        """How an agent is installed that joins with this token."""
        from phalanx.control.backends.bare.unit import InstallOptions

        return InstallOptions(
            url=self.url,
            token=token,
            version=__version__,
            folder=self.folder,
            python=self.python,
            install=self.install,
            ca=self.ca,
            fingerprint=self.fingerprint,
            options=self.agent_options,
            ssh=self.ssh,
        )


@app.command()
@takes_options
def add(
    options: AddOptions, server: ServerUrl = "", state: State = None, json: Json = False
) -> None:
    """Install or upgrade agents, a few at a time; run it again to continue where it stopped.

    Jobs are not stopped: workers outlive their agent, and the new one adopts them.
    """
    from phalanx.control.backends.bare.rollout import HostOutcome, Rollout, memory_of, read_hosts
    from phalanx.control.wire.api_types import NewToken, NodeList, TokenIn

    with exit_on_config_error(json):
        hosts = read_hosts(_text(options.hosts))

    def report(outcome: HostOutcome) -> None:
        if not json:
            print(f"{outcome.host}: {outcome.state} {outcome.detail}".rstrip(), flush=True)

    with connected(server, json, state) as client:

        def joined() -> list[str]:
            nodes = client.get("/v1/nodes", NodeList, limit=20_000).nodes
            return [node.name for node in nodes if node.connected]

        wanted = TokenIn(name="fleet-add", role="agent", hours=24.0)
        token = client.post("/v1/tokens", wanted, NewToken).secret
        rollout = Rollout(options.install_options(token), memory_of(options.url), joined)
        outcomes = rollout.run(hosts, options.parallel, report)
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
