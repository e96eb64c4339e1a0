"""Runs an agent until it is told to end: claim, wait for work where it shall, serve."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from phalanx.cluster.node import Node
from phalanx.control.agent.cold_start import (
    TOKEN_SECONDS,
    TokenError,
    join_token,
    trusted_authority,
    wait_for_work,
)
from phalanx.control.agent.config import AgentConfig
from phalanx.control.agent.description import DescriptionSources, NodeDescriber
from phalanx.control.agent.identity import AlreadyRunsError, claim, own_address
from phalanx.control.agent.uplink import JoinError
from phalanx.control.trust.tls import FINGERPRINT_VARIABLE

if TYPE_CHECKING:
    from phalanx.control.agent.process import AgentProcess

UNTIL_SECONDS = 1.0


class AgentStartError(Exception):
    """The agent cannot serve its node, and why."""


class AgentStart(Struct, frozen=True, kw_only=True):
    """How an agent is run, as whoever starts it asks."""

    urls: tuple[str, ...]
    state: Path
    node: Node  # what it offers
    sources: DescriptionSources = DescriptionSources()  # of what else it is
    address: str = ""  # that other nodes reach this one at; "": as the server is reached
    fingerprint: str = ""  # of the server's authority
    in_allocation: bool = False  # an engine's: its SIGTERM is the last word
    standby: bool = True  # torch and a worker are ready before the first job
    switch_users: bool = True
    config: AgentConfig = AgentConfig()
    follow: int = 0  # a process that it ends with
    outlived: bool = False  # then what runs here waits, for a lease
    until: Path | None = None  # it ends when somebody writes this file


def run_agent(start: AgentStart) -> None:
    """Serves a node until SIGINT or SIGTERM; AgentStartError where it cannot."""
    if start.until is not None:
        watched = (start.until, _written(start.until))
        threading.Thread(target=_end_with, args=watched, daemon=True).start()
    try:
        claim(start.state)
        token = join_token(start.urls, TOKEN_SECONDS if start.in_allocation else 0.0)
        if not start.standby:
            options = start.config.describe
            describer = NodeDescriber(start.node, start.sources, start.state, options)
            waiting = wait_for_work(start.urls, start.state, describer, token, start.fingerprint)
            asyncio.run(waiting)
        _serve(start, token)
    except (JoinError, TokenError, AlreadyRunsError, OSError) as error:
        raise AgentStartError(str(error)) from None
    except asyncio.CancelledError:  # told to end before there was work
        return


def _serve(start: AgentStart, token: str) -> None:
    # Only now: an agent that waits for work loads no more than it needs for that.
    from phalanx.control.agent.process import AgentOptions, AgentProcess
    from phalanx.control.agent.spawn.zygote_client import ZygoteError

    options = AgentOptions(
        urls=start.urls,
        state=start.state,
        node=start.node,
        sources=start.sources,
        address=start.address or own_address(start.urls[0]),
        join_token=token,
        ca=trusted_authority(start.urls),
        fingerprint=start.fingerprint or os.environ.get(FINGERPRINT_VARIABLE, ""),
        switch_users=start.switch_users,
        config=start.config,
    )
    try:
        asyncio.run(_run(AgentProcess(options), start))
    except ZygoteError as error:
        raise JoinError(str(error)) from None


async def _run(process: AgentProcess, start: AgentStart) -> None:
    from phalanx.control.host.parent_death import follow

    serving = asyncio.ensure_future(process.run())
    ending = asyncio.Event()
    loop = asyncio.get_running_loop()

    def end() -> None:
        ending.set()
        serving.cancel()

    loop.add_signal_handler(signal.SIGINT, end)
    # An engine that ends a step kills what it sees, and not what an agent left behind.
    loop.add_signal_handler(signal.SIGTERM, end if start.in_allocation else serving.cancel)
    if start.follow:
        follow(start.follow, signal.SIGTERM if start.outlived else signal.SIGINT)
    try:
        await serving
    except asyncio.CancelledError:
        pass
    finally:
        if ending.is_set():
            await process.leave()


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
