"""Agents that wait for work before the command line is there to read their options.

Sixty-four of them start on one machine in a test, thousands from one file server at a site: what
parses and checks options costs more than half of such a start, and can wait until there is work.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from msgspec import structs

from phalanx.cluster.node import Node
from phalanx.config import ConfigError
from phalanx.control.agent.config import DescribeOptions
from phalanx.control.agent.description import (
    DescriptionSources,
    NodeDescriber,
    base_node,
    offered_facts,
    told_facts,
)
from phalanx.control.agent.identity import (
    AlreadyRunsError,
    claim,
    machine_id,
    next_incarnation,
)
from phalanx.control.agent.idle import ColdAgent
from phalanx.control.agent.uplink import JoinError, Uplink
from phalanx.control.host.node_facts import ENGINES, engine_of, node_facts
from phalanx.control.trust.certificates import CERTIFICATE_FILE
from phalanx.control.trust.secret_file import read_text
from phalanx.control.trust.tls import CA_VARIABLE, FINGERPRINT_VARIABLE
from phalanx.control.wire.agent_messages import JoinRequest
from phalanx.control.wire.server_file import ServerFile
from phalanx.hardware.probe.description import OPTION
from phalanx.hardware.probe.site_file import GivenDescription

TOKEN_SECONDS = 60.0
POLL_SECONDS = 0.5
TEXTS = ("kind", "partition", "domain", "leaf", "pod", "rack", "power", "switch")  # as options


class TokenError(Exception):
    """There is no join token, and why."""


def waited_for_work(argv: list[str]) -> list[str]:
    """The options of an agent that shall wait, once there is work, without that one.

    Others, and those that only the command line can explain, come back at once and unchanged.
    """
    if "--no-standby" not in argv:
        return argv
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    texts = (*TEXTS, "hardware", "site-file")
    for name in ("join", "name", "state", "site", "fingerprint", *texts):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--gpus", type=int)
    parser.add_argument("--rails", type=int, default=0)
    parser.add_argument("--feature", action="append", default=[])
    for name in ("--no-standby", "--as-agent"):
        parser.add_argument(name, action="store_true")
    try:
        given, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError:
        return argv
    urls = tuple(url.strip().rstrip("/") for url in given.join.split(",") if url.strip())
    if given.site not in ("", *ENGINES):
        return argv
    facts = node_facts(given.site, os.environ)
    if unknown or not urls or not facts.first or given.name.isdigit():
        return argv
    try:
        described = DescriptionSources(hardware=given.hardware, site_file=given.site_file).checked()
    except ConfigError:
        return argv
    _run(given, urls, described)
    return [word for word in argv if word != "--no-standby"]


def _run(given: argparse.Namespace, urls: tuple[str, ...], sources: DescriptionSources) -> None:
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    texts = {key: getattr(given, key) for key in TEXTS}
    told = GivenDescription(**texts, rails=given.rails, features=tuple(given.feature))
    node, sources = node_here(given.site, sources, told, name=given.name, gpus=given.gpus)
    state = state_folder(Path(given.state) if given.state else None, node.name)
    describer = NodeDescriber(node, sources, state, DescribeOptions())
    try:
        claim(state)
        token = join_token(urls, TOKEN_SECONDS if given.site else 0.0)
        asyncio.run(wait_for_work(urls, state, describer, token, given.fingerprint))
    except (JoinError, TokenError, AlreadyRunsError, OSError) as error:
        sys.exit(f"error: {error}")  # said on stderr; the exit code is 1
    except asyncio.CancelledError:  # told to end before there was work
        sys.exit(0)


def node_here(
    site: str, sources: DescriptionSources, given: GivenDescription, *, name: str, gpus: int | None
) -> tuple[Node, DescriptionSources]:
    """What this machine offers, and where its description comes from: options and an engine too."""
    facts = node_facts(site, os.environ)
    engine = engine_of(site, os.environ)
    name = name or facts.name or socket.gethostname()
    node = base_node(name, facts.gpus if gpus is None else gpus, sources.reader())
    counted = OPTION if gpus is not None else engine if facts.gpus is not None else ""
    said = (*offered_facts(node, counted), *told_facts(given, engine, facts))
    return node, structs.replace(sources, told=said)


def state_folder(given: Path | None, name: str) -> Path:
    """Where the agent of a node keeps its state."""
    return (given or Path.home() / ".phalanx" / "agent" / name).absolute()


async def wait_for_work(
    urls: tuple[str, ...],
    folder: Path,
    describer: NodeDescriber,
    token: str,
    fingerprint: str = "",
) -> None:
    """Join and live, and no more, until there is an order."""
    # Started in the background of a shell, it would not hear SIGINT.
    waiting, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert waiting is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, waiting.cancel)
    machine = machine_id(folder)
    join = JoinRequest(name=describer.node.name, machine=machine, key="")
    fingerprint = fingerprint or os.environ.get(FINGERPRINT_VARIABLE, "")
    uplink = Uplink(urls, folder, join, token, trusted_authority(urls), fingerprint)
    await ColdAgent(describer, machine, next_incarnation(folder), uplink).run()


def join_token(urls: tuple[str, ...], patience: float) -> str:
    """The token; inside an allocation its file may be written by a controller that just starts.

    Beside a server that runs here, as the same user, it is found by itself.
    """
    if token := os.environ.get("PHALANX_TOKEN"):
        return token.strip()
    path = os.environ.get("PHALANX_TOKEN_FILE")
    if not path:
        return _token_of_server_here(urls)
    deadline = time.monotonic() + patience
    while not Path(path).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        raise TokenError(f"no token: {path}: {error.strerror}") from None


def _token_of_server_here(urls: tuple[str, ...]) -> str:
    """The join token of a server of this user on this machine; "": there is none.

    One that is just being started (`phalanx up &` in the same script) is waited for.
    """
    local_urls = [
        url for url in urls if urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")
    ]
    deadline = time.monotonic() + TOKEN_SECONDS
    answers = False
    while True:
        if token := _read_token(urls):
            return token
        if not local_urls or answers or time.monotonic() > deadline:
            return ""
        answers = any(_answers(url) for url in local_urls)
        time.sleep(POLL_SECONDS)


def trusted_authority(urls: tuple[str, ...]) -> str:
    """A file with the authority to trust: the one that is named, or of this user's server here."""
    if named := os.environ.get(CA_VARIABLE):
        return named
    state = _server_here(urls)
    own = state / CERTIFICATE_FILE if state is not None else None
    return str(own) if own is not None and os.access(own, os.R_OK) else ""


def _read_token(urls: tuple[str, ...]) -> str:
    state = _server_here(urls)
    return read_text(state / "join.token") if state is not None else ""


def _server_here(urls: tuple[str, ...]) -> Path | None:
    """The state folder of a server of this user on this machine that has one of these addresses."""
    state = Path(os.environ.get("PHALANX_STATE") or Path.home() / ".phalanx" / "server")
    try:
        return state if ServerFile.read(state).url.rstrip("/") in urls else None
    except (OSError, ValueError, msgspec.MsgspecError):
        return None  # nobody has started one here, or its files are somebody else's


def _answers(url: str) -> bool:
    parts = urlsplit(url)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        with socket.create_connection((parts.hostname or "", port), timeout=POLL_SECONDS):
            return True
    except (OSError, ValueError):
        return False
