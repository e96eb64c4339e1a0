"""``phalanx agent``: the process of a node."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.option_struct import takes_options
from phalanx.cli.output import exit_on, exit_on_config_error, fail
from phalanx.cli.process import log_to_stderr

if TYPE_CHECKING:
    from phalanx.control.agent.config import AgentConfig
    from phalanx.control.agent.description import DescriptionSources
    from phalanx.control.agent.main import AgentStart

app = typer.Typer()

ADDRESS = re.compile(r"[A-Za-z0-9_.:%-]{1,253}")


@dataclass(frozen=True, kw_only=True)
class AgentCommand:
    """What ``phalanx agent`` is asked for."""

    join: Annotated[str, typer.Option(help="URL of the server; several, with commas: standby.")]
    fingerprint: Annotated[
        str, typer.Option(help="Fingerprint of the server's CA, as `phalanx up` prints it.")
    ] = ""
    name: Annotated[str, typer.Option(help="Of this node (default: the host's name).")] = ""
    state: Annotated[Path | None, typer.Option(help="Folder for its state.")] = None
    gpus: Annotated[int | None, typer.Option(min=0, help="GPUs to offer (default: all).")] = None
    address: Annotated[str, typer.Option(help="Where other nodes reach this one.")] = ""
    kind: Annotated[str, typer.Option(help="Of its GPUs, e.g. h100 (default: by product).")] = ""
    partition: Annotated[str, typer.Option(help="Of the cluster (default: default).")] = ""
    domain: Annotated[str, typer.Option(help="Its NVLink domain (default: as it is read).")] = ""
    rails: Annotated[int, typer.Option(min=0, max=63, help="Network planes; 0: as read.")] = 0
    leaf: Annotated[str, typer.Option(help="Its first switch (default: as it is read).")] = ""
    pod: Annotated[str, typer.Option(help="Its spine (default: as it is read).")] = ""
    rack: Annotated[str, typer.Option(help="Its rack, a failure domain.")] = ""
    power: Annotated[str, typer.Option(help="Its power feed, a failure domain.")] = ""
    switch: Annotated[str, typer.Option(help="Its switch, a failure domain.")] = ""
    site_file: Annotated[
        str, typer.Option(help="TOML file: where the site's nodes stand (default: --config's).")
    ] = ""
    hardware: Annotated[
        str, typer.Option(help="Folder of recorded hardware, read instead of this machine.")
    ] = ""
    feature: Annotated[
        list[str] | None, typer.Option(help="Feature that constraints can name (repeatable).")
    ] = None
    site: Annotated[
        str, typer.Option(help="Engine that knows this node: slurm, kubernetes, mpi, auto.")
    ] = ""
    standby: Annotated[
        bool,
        typer.Option(
            help="Keep a worker with torch imported ready, or start nothing before a job."
        ),
    ] = True
    config: Annotated[
        Path | None, typer.Option(help="TOML file: fault sources, hooks, binding, replicas.")
    ] = None
    follow: Annotated[int, typer.Option(hidden=True, help="End with this process.")] = 0
    outlived: Annotated[
        bool,
        typer.Option("--outlived", hidden=True, help="Then what runs here waits, for a lease."),
    ] = False
    until: Annotated[
        Path | None, typer.Option(hidden=True, help="End when somebody writes this file.")
    ] = None
    as_agent: Annotated[
        bool, typer.Option("--as-agent", help="Run jobs as the agent's own user, even if root.")
    ] = False

    def urls(self) -> tuple[str, ...]:
        """Addresses of the server and its standby."""
        return tuple(url.strip().rstrip("/") for url in self.join.split(",") if url.strip())

    def problem(self) -> str:
        """What is wrong with the options; "": nothing."""
        from phalanx.control.host.node_facts import ENGINES

        urls = self.urls()
        if not urls or not all(url.startswith(("http://", "https://")) for url in urls):
            return f"{self.join!r} is no address of a server: use http://HOST:PORT"
        if self.site not in ("", *ENGINES):
            return f"--site {self.site}: one of {', '.join(ENGINES)}"
        if self.address and not ADDRESS.fullmatch(self.address):
            return f"--address {self.address!r}: a host's name or its IP address"
        return ""

    def sources(self, config: AgentConfig) -> DescriptionSources:
        """Where the node's description comes from; ConfigError where that cannot be read."""
        from phalanx.control.agent.description import DescriptionSources

        return DescriptionSources(
            hardware=self.hardware or config.describe.hardware,
            site_file=self.site_file or config.describe.site_file,
            labels_file=config.describe.labels_file,
            program_seconds=config.describe.program_seconds,
        ).checked()

    def agent_start(self, sources: DescriptionSources, config: AgentConfig) -> AgentStart:
        """The same for the agent, with what an engine knows of this node."""
        from phalanx.control.agent.cold_start import TEXTS, node_here, state_folder
        from phalanx.control.agent.main import AgentStart
        from phalanx.hardware.probe.site_file import GivenDescription

        texts = {key: getattr(self, key) for key in TEXTS}
        told = GivenDescription(**texts, rails=self.rails, features=tuple(self.feature or ()))
        node, sources = node_here(self.site, sources, told, name=self.name, gpus=self.gpus)
        return AgentStart(
            urls=self.urls(),
            state=state_folder(self.state, node.name),
            node=node,
            sources=sources,
            address=self.address,
            fingerprint=self.fingerprint,
            in_allocation=bool(self.site),
            standby=self.standby,
            switch_users=not self.as_agent and os.getuid() == 0,
            config=config,
            follow=self.follow,
            outlived=self.outlived,
            until=self.until,
        )


@app.command()
@takes_options
def agent(command: AgentCommand) -> None:
    """Run a node's agent: join a server, run workers, report their state.

    The join token comes from PHALANX_TOKEN, the file in PHALANX_TOKEN_FILE, or the state folder of
    a server of yours on this machine. SIGINT ends the node's workers; after SIGTERM they run on for
    a while, and the next agent adopts them. With --site SIGTERM ends them too, since that is how
    the engine announces the end of the allocation.
    """
    from phalanx.control.agent.config import AgentConfig, read_agent_config
    from phalanx.control.agent.main import AgentStartError, run_agent
    from phalanx.control.host.node_facts import node_facts

    log_to_stderr()
    with exit_on_config_error():
        config = read_agent_config(command.config) if command.config else AgentConfig()
        if command.config:
            config.replicas.resolved()
        sources = command.sources(config)
    if problem := command.problem():
        fail(problem, 2)
    facts = node_facts(command.site, os.environ)
    if not facts.first:
        return  # another process of this node is its agent
    start = command.agent_start(sources, config)
    if start.node.name.isdigit():
        fail(f"{start.node.name} would be taken for a job: give it a letter (--name)", 2)
    with exit_on(AgentStartError):
        run_agent(start)
