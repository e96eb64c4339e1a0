"""``phalanx agent``: the process of a node."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.output import exit_on_config_error

if TYPE_CHECKING:
    from phalanx.control.agent.process import AgentProcess

app = typer.Typer()

UNTIL_SECONDS = 1.0
ADDRESS = re.compile(r"[A-Za-z0-9_.:%-]{1,253}")


@app.command()
def agent(
    join: Annotated[str, typer.Option(help="URL of the server; several, with commas: standby.")],
    fingerprint: Annotated[
        str, typer.Option(help="Of the server's authority, as `phalanx up` prints it.")
    ] = "",
    name: Annotated[str, typer.Option(help="Of this node (default: the host's name).")] = "",
    state: Annotated[Path | None, typer.Option(help="Folder for its state.")] = None,
    gpus: Annotated[int | None, typer.Option(min=0, help="GPUs to offer (default: all).")] = None,
    address: Annotated[str, typer.Option(help="Where other nodes reach this one.")] = "",
    leaf: Annotated[str, typer.Option(help="Its first switch.")] = "leaf-0",
    pod: Annotated[str, typer.Option(help="Its spine.")] = "pod-0",
    rack: Annotated[str, typer.Option(help="Its rack, a failure domain.")] = "",
    feature: Annotated[list[str] | None, typer.Option(help="That constraints may name.")] = None,
    site: Annotated[
        str, typer.Option(help="Engine that knows this node: slurm, kubernetes, mpi, auto.")
    ] = "",
    standby: Annotated[
        bool, typer.Option(help="Have torch and a worker ready, or start nothing before a job.")
    ] = True,
    config: Annotated[
        Path | None, typer.Option(help="TOML file: fault sources, hooks, binding, replicas.")
    ] = None,
    follow: Annotated[int, typer.Option(hidden=True, help="End with this process.")] = 0,
    outlived: Annotated[
        bool,
        typer.Option("--outlived", hidden=True, help="Then what runs here waits, for a lease."),
    ] = False,
    until: Annotated[
        Path | None, typer.Option(hidden=True, help="End when somebody writes this file.")
    ] = None,
    as_agent: Annotated[
        bool, typer.Option("--as-agent", help="Run jobs as the agent's own user, even if root.")
    ] = False,
) -> None:
    """Serve a node: join a server, run workers, tell how they do.

    The join token comes from PHALANX_TOKEN, the file in PHALANX_TOKEN_FILE, or the state folder of
    a server of yours on this machine. SIGINT ends what runs here; after SIGTERM it runs on for a
    while, and the next agent takes it over. With --site SIGTERM ends it as well: it is the engine's
    last word.
    """
    from phalanx.control.agent.cold_start import (
        TOKEN_SECONDS,
        TokenError,
        join_token,
        trusted_authority,
        wait_for_work,
    )
    from phalanx.control.agent.config import AgentConfig, read_agent_config
    from phalanx.control.agent.identity import AlreadyRunsError, claim, describe_node, own_address
    from phalanx.control.agent.uplink import JoinError
    from phalanx.control.backends.site import ENGINES, node_facts

    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    with exit_on_config_error():
        settings = read_agent_config(config) if config else AgentConfig()
        if config:
            settings.replicas.resolved()
    urls = tuple(url.strip().rstrip("/") for url in join.split(",") if url.strip())
    if not urls or not all(url.startswith(("http://", "https://")) for url in urls):
        print(f"error: {join!r} is no address of a server: use http://HOST:PORT", file=sys.stderr)
        raise typer.Exit(2)
    if site not in ("", *ENGINES):
        print(f"error: --site {site}: one of {', '.join(ENGINES)}", file=sys.stderr)
        raise typer.Exit(2)
    if address and not ADDRESS.fullmatch(address):
        print(f"error: --address {address!r}: a host's name or its IP address", file=sys.stderr)
        raise typer.Exit(2)
    facts = node_facts(site, os.environ)
    if not facts.first:
        return  # another process of this node is its agent
    name = name or facts.name or socket.gethostname()
    if name.isdigit():
        print(f"error: {name} would be taken for a job: give it a letter (--name)", file=sys.stderr)
        raise typer.Exit(2)
    folder = (state or Path.home() / ".phalanx" / "agent" / name).absolute()
    node = describe_node(
        name,
        facts.gpus if gpus is None else gpus,
        leaf=facts.leaf or leaf,
        pod=facts.pod or pod,
        rack=rack or facts.rack,
        features=tuple(feature or ()),
    )
    if until is not None:
        threading.Thread(target=_end_with, args=(until, _written(until)), daemon=True).start()
    try:
        claim(folder)
        token = join_token(urls, TOKEN_SECONDS if site else 0.0)
        if not standby:
            asyncio.run(wait_for_work(urls, folder, node, token, fingerprint))
        from phalanx.control.agent.process import AgentOptions, AgentProcess
        from phalanx.control.agent.spawn.zygote_client import ZygoteError

        options = AgentOptions(
            urls=urls,
            state=folder,
            node=node,
            address=address or own_address(urls[0]),
            join_token=token,
            ca=trusted_authority(urls),
            fingerprint=fingerprint or os.environ.get("PHALANX_FINGERPRINT", ""),
            switch_users=not as_agent and os.getuid() == 0,
            config=settings,
        )
        try:
            word = signal.SIGTERM if outlived else signal.SIGINT
            asyncio.run(_run(AgentProcess(options), follow, word, term_ends=bool(site)))
        except ZygoteError as error:
            raise JoinError(str(error)) from None
    except (JoinError, TokenError, AlreadyRunsError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    except asyncio.CancelledError:  # told to end before there was work
        raise typer.Exit(0) from None


def _written(path: Path) -> int:
    """When a file was written; 0: it is not there."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _end_with(path: Path, before: int) -> None:
    """Where nobody ends agents when their job has ended, its controller writes a file."""
    while _written(path) in (0, before):
        time.sleep(UNTIL_SECONDS)
    os.kill(os.getpid(), signal.SIGINT)


async def _run(process: AgentProcess, parent: int, word: int, *, term_ends: bool) -> None:
    from phalanx.control.host.parent_death import follow

    serving = asyncio.ensure_future(process.run())
    ending = asyncio.Event()
    loop = asyncio.get_running_loop()

    def end() -> None:
        ending.set()
        serving.cancel()

    loop.add_signal_handler(signal.SIGINT, end)
    # An engine that ends a step kills what it sees, and not what an agent left behind.
    loop.add_signal_handler(signal.SIGTERM, end if term_ends else serving.cancel)
    if parent:
        follow(parent, word)
    try:
        await serving
    except asyncio.CancelledError:
        pass
    finally:
        if ending.is_set():
            await process.leave()
