"""An agent's connection to its server: joins, connects, stays connected, or says why it cannot."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import msgspec
from msgspec import structs
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from phalanx import __version__
from phalanx.cluster.protocol.commands import Form
from phalanx.control.trust.node_key import (
    AGREEMENT_HEADER,
    LINK_BYTES,
    NONCE_HEADER,
    SERVER_FILE,
    SERVER_HEADER,
    NodeClaim,
    claim_proof,
    fingerprint,
    node_key,
)
from phalanx.control.trust.secret_file import read_text, write_secret
from phalanx.control.trust.server_key import ordered_by
from phalanx.control.trust.tls import TlsError, advice, is_loopback, trusting, trusting_pinned
from phalanx.control.wire import agent_messages as wire
from phalanx.control.wire.shell_messages import OpenShell

PENDING_SECONDS = 5.0  # between two looks whether an administrator has decided
RECONNECT_PAUSES_SECONDS = (0.05, 0.1, 0.2, 0.5, 1.0)
FRAME_BYTES = 64 << 20

Answered = Callable[[], None]

# What may be over soon; a RuntimeError is that the machine has no thread left just now.
UNREACHED = (OSError, ConnectionClosed, InvalidHandshake, msgspec.MsgspecError, RuntimeError)

log = logging.getLogger("phalanx.agent")


class JoinError(Exception):
    """The server does not let this agent in, and trying again would not help."""


class Listener(Protocol):
    """Whom the connection is for."""

    def register(self) -> wire.Register:
        """The first word of a connection."""

    def welcomed(self, welcome: wire.Welcome) -> None:
        """The server let us in; what is sent from here on arrives."""

    def heard(self, message: wire.Down) -> None:
        """The server said something."""

    def parted(self) -> None:
        """The connection is gone."""

    def no_server(self, at: float) -> None:
        """No server ran at this time (monotonic): its machines refused the connection."""


class Uplink:
    """One agent's connections, one at a time; ``name`` and ``machine`` are what it joins as."""

    def __init__(
        self,
        urls: tuple[str, ...],
        state: Path,
        join: wire.JoinRequest,
        join_token: str,
        ca: str,
        fingerprint: str = "",
    ) -> None:
        self._urls, self._join_token, self._ca = urls, join_token, ca
        self._fingerprint = fingerprint  # of the server's authority; "": ``ca``, or none
        self._authority = state / "authority.pem"
        self._key = node_key(state)
        self._join_request = structs.replace(join, key=self._key.public)
        self._link = b""  # what the server gave us to prove ourselves with next time
        self._pin_file = state / SERVER_FILE
        self._server_key = bytes.fromhex(read_text(self._pin_file))
        self._token_file = state / "agent.token"
        self._token = read_text(self._token_file)
        self._waits = False  # an administrator has yet to let this node in
        self._connected = False
        self._outgoing: asyncio.Queue[bytes | Answered] = asyncio.Queue()
        self._connection: ClientConnection | None = None

    async def reconnect(self) -> None:
        """Register again: what was told then has changed."""
        if self._connection is not None:
            await self._connection.close()

    def send(self, message: msgspec.Struct) -> None:
        """Tell the server; without a connection the word is lost."""
        if self._connected:
            self._outgoing.put_nowait(wire.encode(message))

    def ask(self, answered: Answered) -> None:
        """Have the server answer, once it has read all that was sent before."""
        if self._connected:
            self._outgoing.put_nowait(answered)

    async def serve(self, listener: Listener) -> None:
        """Stay connected until cancelled; raises JoinError where the server refuses for good."""
        tries = 0
        while True:
            began, refused = time.monotonic(), 0
            for url in self._urls:
                try:
                    if await self._once(url, listener):
                        tries = 0
                except UNREACHED as error:
                    refused += isinstance(error, ConnectionRefusedError)
                    level = logging.WARNING if tries == 0 else logging.DEBUG
                    why = getattr(error, "reason", error)  # urllib hides it in an error of its own
                    why = next(filter(None, (advice(each, url) for each in (error, why))), why)
                    log.log(level, "no server answers at %s (%s): trying again", url, why)
            if refused == len(self._urls):
                listener.no_server(began)
            pause = RECONNECT_PAUSES_SECONDS[min(tries, len(RECONNECT_PAUSES_SECONDS) - 1)]
            await asyncio.sleep(PENDING_SECONDS if self._waits else pause)
            tries += 1

    async def _once(self, url: str, listener: Listener) -> bool:
        """One connection, until it ends; whether it was let in."""
        trust = await asyncio.to_thread(self._trust, url)
        if not self._token:
            await asyncio.to_thread(self._join, url, trust)
        try:
            connecting = connect(
                url.replace("http", "ws", 1) + wire.AGENT_PATH,
                additional_headers={"Authorization": f"Bearer {self._token}"},
                compression=None,
                max_size=FRAME_BYTES,
                ping_interval=None,
                open_timeout=10,
                ssl=trust,
                proxy=None,
            )
            async with connecting as connection:
                return await self._talk(connection, listener)
        except InvalidStatus as error:
            if error.response.status_code not in (401, 403):
                raise
            if not self._join_token:
                raise JoinError(_why(error.response.body)) from None
            log.warning("the server no longer knows this node's token: joining again")
            self._token = ""
            self._token_file.unlink(missing_ok=True)
            return False

    async def _talk(self, connection: ClientConnection, listener: Listener) -> bool:
        await connection.send(wire.encode(self._proved(connection, listener.register())))
        first = _decoded(await connection.recv(decode=False))
        if isinstance(first, wire.Rejected):
            if first.code == wire.RejectCode.UNLINKED:
                self._link = b""
            if first.code == wire.RejectCode.PENDING and not self._waits:
                log.warning("%s", first.message)
            self._waits = first.code == wire.RejectCode.PENDING
            return _rejected(first)
        if not isinstance(first, wire.Welcome):
            raise OSError("its first message is no welcome")
        self._waits = False
        self._link = first.link if len(first.link) == LINK_BYTES else b""
        self._outgoing = asyncio.Queue()
        self._connected, self._connection = True, connection
        sending = asyncio.create_task(_pump(connection, self._outgoing))
        try:
            listener.welcomed(first)
            async for data in connection:
                message = _decoded(data)
                if message is None:
                    continue
                if isinstance(message, wire.Rejected):
                    return _rejected(message)
                if (order := self._ordered(message, first.node)) is not None:
                    listener.heard(order)
        finally:
            sending.cancel()
            self._connected, self._connection = False, None
            listener.parted()
        return True

    def _ordered(self, message: wire.Down, node: int) -> wire.Down | None:
        """A message, or the order in it that the server has signed; None: it is refused."""
        if isinstance(message, wire.Signed):
            if ordered_by(self._server_key, message.signature, message.order):
                return _decoded(message.order)
            problem = "it is not signed by the server that this node joined"
        elif _starts_something(message):
            problem = "it is not signed"
        else:
            return message
        log.error("an order is refused: %s", problem)
        self.send(wire.OrderRefused(node=node, problem=problem))
        return None

    def _proved(self, connection: ClientConnection, register: wire.Register) -> wire.Register:
        """The first word with the proof that this node has its key, or its link key."""
        assert connection.response is not None
        said = connection.response.headers
        headers = (NONCE_HEADER, SERVER_HEADER, AGREEMENT_HEADER)
        try:
            nonce, server, agreement = (bytes.fromhex(said.get(name, "")) for name in headers)
            self._pin(server, str(connection.remote_address[0]))
            asked = NodeClaim(nonce, self._server_key, register.node.name, register.machine)
            if self._link:
                proof = claim_proof(self._link, asked)
            else:
                proof = self._key.prove(asked, agreement)
        except ValueError:
            raise ConnectionError(
                "the server's answer to the handshake has no usable keys"
            ) from None
        linked = bool(self._link)
        return structs.replace(register, key=self._key.public, proof=proof, linked=linked)

    def _pin(self, key: bytes, host: str) -> None:
        """Remember the server that this node joined; another one may not take its place."""
        if key == self._server_key:
            return
        # Servers on the node's own machine come and go; whoever has one there has the node.
        if self._server_key and not is_loopback(host):
            raise JoinError(
                f"the server has another key than the one that this node joined: if that is "
                f"meant, remove {self._pin_file} and start the agent again"
            )
        self._server_key = key
        write_secret(self._pin_file, key.hex())

    def _trust(self, url: str) -> ssl.SSLContext | None:
        """Whom to believe to be the server; None: nothing is encrypted."""
        if not url.startswith("https:"):
            return None
        try:
            pinned = self._fingerprint or (self._authority.exists() and not self._ca)
            if pinned:
                return trusting_pinned(url, self._fingerprint, self._authority)
            return trusting(self._ca)
        except TlsError as error:
            raise JoinError(str(error)) from None

    def _join(self, url: str, trust: ssl.SSLContext | None) -> None:
        """Exchanges the join token for one that is good for this node alone."""
        if not self._join_token:
            raise JoinError(
                "no join token: set PHALANX_TOKEN_FILE to a file that has one "
                "(`phalanx token create --role agent`, or join.token in the server's state folder)"
            )
        headers = {
            "Authorization": f"Bearer {self._join_token}",
            "Content-Type": "application/json",
        }
        call = urllib.request.Request(
            f"{url}/v1/join", msgspec.json.encode(self._join_request), headers, method="POST"
        )
        try:
            with urllib.request.urlopen(call, timeout=10, context=trust) as got:
                answer = msgspec.json.decode(got.read(), type=wire.JoinAnswer)
        except urllib.error.HTTPError as error:
            if error.code in (429, 503):
                raise OSError(_why(error.read())) from None
            raise JoinError(_why(error.read())) from None
        self._pin(bytes.fromhex(answer.server_key), urlsplit(url).hostname or "")
        if answer.pending:
            log.warning(
                "%s waits to be let in: an administrator runs `phalanx nodes approve %s` (its key "
                "is %s)",
                *(2 * (self._join_request.name,)),
                fingerprint(self._key.public),
            )
        self._waits = answer.pending
        self._link = b""
        self._token = answer.token
        write_secret(self._token_file, answer.token)


def _decoded(data: bytes | str) -> wire.Down | None:
    """A message; None where it is none, which is said and costs nothing else."""
    try:
        if isinstance(data, bytes):
            message: wire.Down = wire.decode_down(data)
            return message
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        log.error("a message of the server cannot be read and is left out: %s", error)
    return None


def _starts_something(message: wire.Down) -> bool:
    """Whether it has a node run what the message says, as whom it says."""
    if isinstance(message, wire.Deliver):
        return isinstance(message.command.body, Form)
    return isinstance(message, OpenShell | wire.StartAcceptance)


async def _pump(connection: ClientConnection, outgoing: asyncio.Queue[bytes | Answered]) -> None:
    with suppress(ConnectionClosed):
        while True:
            message = await outgoing.get()
            if isinstance(message, bytes):
                await connection.send(message)
            else:
                pong = asyncio.ensure_future(await connection.ping())
                pong.add_done_callback(partial(_answer, message))


def _answer(answered: Answered, pong: asyncio.Future[float]) -> None:
    if not pong.cancelled() and pong.exception() is None:
        answered()


def _rejected(rejected: wire.Rejected) -> bool:
    """False where trying again may help."""
    if not rejected.retry and rejected.code == wire.RejectCode.REPLACED:
        raise JoinError("another process has connected as this agent")
    if not rejected.retry:
        raise JoinError(
            f"the server (phalanx {rejected.version}) refuses this agent (phalanx "
            f"{__version__}): {rejected.message}"
        )
    log.info("the server: %s", rejected.message)
    return False


def _why(body: bytes | bytearray | None) -> str:
    try:
        return str(json.loads(body or b"")["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server refused: {(body or b'')[:200]!r}"
