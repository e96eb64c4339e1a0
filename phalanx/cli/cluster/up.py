"""``phalanx up``: the server."""

from __future__ import annotations

import asyncio
import os
import shlex
import socket
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec import structs

from phalanx.cli.option_struct import takes_options
from phalanx.cli.options import Json, State
from phalanx.cli.output import exit_on, exit_on_config_error, print_json
from phalanx.cli.process import log_to_stderr

if TYPE_CHECKING:
    from phalanx.cluster.policy import Policy
    from phalanx.control.server.process import Options, Server

app = typer.Typer()

JOIN_SECONDS = 120.0  # for nodes of this machine, however busy it is


@dataclass(frozen=True, kw_only=True)
class UpOptions:
    """What ``phalanx up`` is asked for."""

    state: State = None
    host: Annotated[
        str, typer.Option(help="Address to listen on; others than loopback speak TLS.")
    ] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 7070
    store: Annotated[
        str, typer.Option(help="postgresql://… for a pair of servers (default: SQLite).")
    ] = ""
    url: Annotated[str, typer.Option(help="Address that others reach this server by.")] = ""
    policy: Annotated[
        Path | None,
        typer.Option(help="TOML file of the site's policy (default: keep the stored one)."),
    ] = None
    admin_token: Annotated[
        Path | None,
        typer.Option(
            envvar="PHALANX_ADMIN_TOKEN_FILE",
            help="File with the administrator's token (default: one is made in the state).",
        ),
    ] = None
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain, PEM.")] = None
    tls_key: Annotated[Path | None, typer.Option(help="Its key, PEM.")] = None
    plain_http: Annotated[
        bool,
        typer.Option(
            "--plain-http",
            help="Serve HTTP without TLS beyond loopback; tokens travel unencrypted.",
        ),
    ] = False
    requests_per_second: Annotated[
        float, typer.Option(min=0, help="Sustained request limit per token; 0: no limit.")
    ] = 100.0
    nodes: Annotated[int, typer.Option(min=0, help="Number of nodes to start on this machine.")] = 0
    gpus_per_node: Annotated[int, typer.Option(min=1, help="Ranks per node.")] = 1
    spares: Annotated[int, typer.Option(min=0, help="Spare nodes in addition.")] = 0
    keep_event_days: Annotated[
        float,
        typer.Option(min=0, help="Move older events from the log to archive/; 0: never."),
    ] = 30.0
    webhook: Annotated[
        list[str] | None,
        typer.Option(help="Address notified of findings and ended jobs (repeatable)."),
    ] = None
    mail_relay: Annotated[
        str, typer.Option(metavar="HOST[:PORT]", help="SMTP relay for `submit --mail`.")
    ] = ""
    mail_from: Annotated[str, typer.Option(help="Sender address of mail.")] = "phalanx@localhost"
    audit_to: Annotated[
        list[str] | None,
        typer.Option(
            help="Where audit lines are sent too: unix:/dev/log, udp://host:514 (syslog) or "
            "https://host/path; may be repeated."
        ),
    ] = None
    keep_audit_days: Annotated[
        float, typer.Option(min=0, help="Delete older audit files; 0: never.")
    ] = 400.0
    otlp: Annotated[
        str, typer.Option(help="OpenTelemetry collector (http://host:4318) for gangs' traces.")
    ] = ""
    own_nodes: Annotated[
        bool, typer.Option("--own-nodes", hidden=True, help="Whoever starts it starts its agents.")
    ] = False
    follow: Annotated[int, typer.Option(hidden=True, help="End with this process.")] = 0

    def server_options(self) -> Options:
        """How the server is run, without its policy; typer.BadParameter where it cannot be."""
        from phalanx.control.client.client import default_state
        from phalanx.control.server.option_check import first_problem
        from phalanx.control.server.process import Options
        from phalanx.control.trust.tls import is_loopback

        if self.plain_http and self.tls_cert is not None:
            raise typer.BadParameter("give --plain-http, or --tls-cert and --tls-key")
        options = Options(
            state=self.state or default_state(),
            host=self.host,
            port=self.port,
            store=self.store,
            url=self.url,
            own_nodes=self.own_nodes or is_loopback(self.host),
            admin_token=self.admin_token,
            tls_cert=self.tls_cert,
            tls_key=self.tls_key,
            own_tls=not (self.tls_cert or self.plain_http or is_loopback(self.host)),
            requests_per_second=self.requests_per_second,
            failures_per_second=5.0 if self.requests_per_second else 0.0,
            webhooks=tuple(self.webhook or ()),
            mail_relay=self.mail_relay,
            mail_from=self.mail_from,
            audit_to=tuple(self.audit_to or ()),
            keep_audit_days=self.keep_audit_days,
            otlp=self.otlp,
            keep_event_days=self.keep_event_days,
        )
        if problem := first_problem(options):
            raise typer.BadParameter(problem.rule, param_hint=problem.option or None)
        return options


@app.command()
@takes_options
def up(given: UpOptions, json: Json = False) -> None:
    """Start the server: controller, API and page on one port.

    With --nodes also a whole cluster on this machine, each node as processes of its own.
    """
    from phalanx.control.host.parent_death import follow
    from phalanx.control.server.main import StartError, serve
    from phalanx.control.trust.tls import is_loopback

    log_to_stderr()
    options = given.server_options()
    if given.plain_http and not is_loopback(given.host):
        print(
            f"warning: {given.host} is reachable by others, "
            "and tokens and orders travel in the clear",
            file=sys.stderr,
        )
    with exit_on_config_error(json):
        options = structs.replace(options, policy=_policy(given.policy, given.spares))
    if given.follow:
        follow(given.follow)
    nodes, gpus = given.nodes + given.spares, given.gpus_per_node
    beside = partial(_local, json, nodes=nodes, gpus=gpus) if given.nodes else None
    with exit_on(StartError):
        serve(options, partial(_say, json), beside)


def _policy(path: Path | None, spares: int) -> Policy | None:
    """The policy of a file; where it has no spare nodes, the pool that was asked for."""
    from phalanx.cluster.policy import Policy
    from phalanx.control.server.policy_file import read_policy

    policy = read_policy(path) if path else None
    if not spares or (policy is not None and policy.spares.nodes):
        return policy
    policy = policy or Policy()
    return structs.replace(policy, spares=structs.replace(policy.spares, nodes=spares))


async def _local(json: bool, server: Server, *, nodes: int, gpus: int) -> None:
    from phalanx.control.backends.local import LocalCluster
    from phalanx.control.trust.certificates import CERTIFICATE_FILE
    from phalanx.control.trust.tls import CA_VARIABLE

    async def tell_joined() -> None:
        joined = await server.await_own_nodes(nodes, JOIN_SECONDS)
        if not json:
            late = (
                "" if joined >= nodes else f" of {nodes}: see local/nodes/*/agent.log of the state"
            )
            print(f"nodes:      {joined} joined{late}", flush=True)

    state = server.options.state
    if server.authority is not None:
        os.environ[CA_VARIABLE] = str(state / CERTIFICATE_FILE)
    telling = asyncio.create_task(tell_joined())
    try:
        await LocalCluster(
            state / "local", server.url, state / "join.token", nodes=nodes, gpus_per_node=gpus
        ).run()
    finally:
        telling.cancel()


def _say(json: bool, server: Server) -> None:
    from phalanx.control.server.api.page import login_url

    admin, join = (server.options.state / name for name in ("admin.token", "join.token"))
    admin = server.options.admin_token or admin
    if server.leading is None:
        _say_standby(json, server)
        return
    if json:
        told = {"url": server.url, "admin_token": str(admin), "join_token": str(join)}
        print_json({**told, "fingerprint": server.fingerprint} if server.fingerprint else told)
        sys.stdout.flush()
        return
    print(f"server:     {server.url}")
    print(f"your token: {admin} ({_found_how(server.options.state)})")
    pinned = f" --fingerprint {server.fingerprint}" if server.fingerprint else ""
    print(f"add a node: phalanx agent --join {_from_elsewhere(server)}{pinned} (token in {join})")
    if sys.stdout.isatty():  # a log must not hold what signs somebody in
        print(f"look:       {login_url(server)}")
        print(
            "            (good once; `phalanx page` prints another, `phalanx top` needs no browser)"
        )
    else:
        print(f"look:       {server.url}/ with a link from `phalanx page`, or `phalanx top`")
    sys.stdout.flush()


def _found_how(state: Path) -> str:
    """What a shell beside this one needs for its commands to find the server and its token."""
    from phalanx.control.client.client import default_state

    if state.absolute() == default_state().absolute():
        return "the command line finds it by itself"
    return f"for the command line: export PHALANX_STATE={shlex.quote(str(state.absolute()))}"


def _from_elsewhere(server: Server) -> str:
    """The address that other machines join at."""
    if server.options.url or server.options.host not in ("0.0.0.0", "::"):
        return server.url
    return server.url.replace("127.0.0.1", socket.gethostname(), 1)


def _say_standby(json: bool, server: Server) -> None:
    """Tokens are the leader's: this one has files of its own only once it leads."""
    if json:
        print_json({"url": server.url, "leader": server.leader})
    else:
        print(f"server:     {server.url}")
        print(f"stands by:  {server.leader or 'another server'} leads; this one takes over from it")
        print("your token: the leader's admin.token, also here (PHALANX_TOKEN_FILE names a copy)")
        print(f"commands:   PHALANX_SERVER={server.leader},{server.url} finds whichever leads")
    sys.stdout.flush()
