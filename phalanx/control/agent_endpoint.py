"""``/v1/agent``: lets agents in, or says why not, and hands their messages to the hub."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

import msgspec

from phalanx import __version__
from phalanx.cluster.events import NodeJoined
from phalanx.cluster.fleet import MOST_NODE_GPUS, Node
from phalanx.control.auth import AuthError, Token, bearer, require
from phalanx.control.connection import Connection, Receive, Send
from phalanx.control.controller import UnavailableError
from phalanx.control.fast_socket import EXTENSION, FastSocket, framed
from phalanx.control.hub import Hub
from phalanx.control.wire import PROTOCOL, Register, Rejected, Welcome, decode_up, encode

if TYPE_CHECKING:
    from phalanx.control.server import Server

logger = logging.getLogger("phalanx.server")

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
SKEW_NS = 30 * 10**9  # a clock that is further off is worth a warning
MOST_NUMBER = 1 << 53


async def serve_agent(
    server: Server, scope: MutableMapping[str, Any], receive: Receive, send: Send
) -> None:
    """One connection, from its handshake to its end."""
    headers = dict(scope["headers"])
    client = scope["client"][0] if scope.get("client") else ""
    socket: FastSocket | None = scope.get("extensions", {}).get(EXTENSION)
    await receive()  # the handshake
    try:
        leading = server.leading_or_refuse()
        token = leading.tokens.check(bearer(headers.get(b"authorization", b"").decode("latin-1")))
        require(token, ("agent",))
    except AuthError as error:
        server.audit.write("agent", error.status, client=client, detail=error.code)
        wait = server.client_limit.take(client, time.monotonic()) if error.status == 401 else 0.0
        if wait:
            error = AuthError(429, "too_many_requests", f"too many wrong tokens: wait {wait:.1f} s")
        await _refuse_handshake(send, error)
        return
    await send({"type": "websocket.accept"})
    hub = leading.hub
    register = await _first(receive)
    refused = _check(hub, token, register)
    if isinstance(register, Register) and refused is None:
        connection = await _let_in(hub, register, Connection(-1, register.machine, send, socket))
        if connection is not None:
            server.audit.write("agent connected", 101, name=token.node, client=client)
            await _listen(hub, connection, receive)
            return
        refused = hub.rejected("internal", "the server cannot store this now", retry=True)
    assert refused is not None
    server.audit.write("agent", 403, name=token.node, client=client, detail=refused.message)
    await send({"type": "websocket.send", "bytes": encode(refused)})
    await send({"type": "websocket.close", "code": 4000, "reason": refused.code})


async def _refuse_handshake(send: Send, error: AuthError) -> None:
    body = msgspec.json.encode({"error": {"code": error.code, "message": str(error)}})
    headers = [(b"content-type", b"application/json")]
    start = {"type": "websocket.http.response.start", "status": error.status, "headers": headers}
    await send(start)
    await send({"type": "websocket.http.response.body", "body": body})


async def _first(receive: Receive) -> Register | str:
    """The first message, or what is wrong with it."""
    message = await receive()
    try:
        first = decode_up(message.get("bytes") or b"")
    except msgspec.MsgspecError as error:
        return f"the first message cannot be read: {error}"
    if not isinstance(first, Register):
        return f"the first message must be Register, not {type(first).__name__}"
    return first


def _check(hub: Hub, token: Token, register: Register | str) -> Rejected | None:
    if isinstance(register, str):
        return hub.rejected("protocol", f"{register} (this server speaks protocol {PROTOCOL})")
    ours, theirs = __version__, register.version
    if register.protocol != PROTOCOL:
        text = (
            f"the agent speaks protocol {register.protocol} (phalanx {theirs}), the server "
            f"protocol {PROTOCOL} (phalanx {ours}): install the same version on both"
        )
        return hub.rejected("protocol", text)
    if theirs.split(".")[:2] != ours.split(".")[:2]:
        text = f"the agent is phalanx {theirs}, the server phalanx {ours}: install {ours} there"
        return hub.rejected("version", text)
    if (register.node.name, register.machine) != (token.node, token.machine):
        text = f"this token was made for node {token.node} and not for {register.node.name}"
        return hub.rejected("wrong_node", f"{text} on this machine: join again")
    known = hub.controller.core.view.fleet.index.get(register.node.name)
    before = hub.connections.get(known) if known is not None else None
    if before is not None and before.machine != register.machine:
        return hub.rejected("name_taken", name_taken(register.node.name))
    problem = bad_node(register.node)
    return hub.rejected("bad_node", problem) if problem else None


def name_taken(name: str) -> str:
    """What the second of two agents with one name is told."""
    return (
        f"another machine is connected as {name}: give this one another name "
        "(`phalanx agent --name NAME`)"
    )


def bad_node(node: Node) -> str:
    """What is wrong with an agent's description of its node."""
    if not NAME.fullmatch(node.name):
        return f"{node.name!r} is no name of a node: letters, digits, dots and dashes, at most 128"
    if not 0 <= node.gpus <= MOST_NODE_GPUS:
        return f"gpus = {node.gpus}: a node has 0 to {MOST_NODE_GPUS}"
    for key in ("cpus", "memory_bytes"):
        if not 0 <= getattr(node, key) <= MOST_NUMBER:
            return f"{key} = {getattr(node, key)}: must be 0 to {MOST_NUMBER}"
    if not 1 <= node.rails <= MOST_NODE_GPUS:
        return f"rails = {node.rails}: a node has 1 to {MOST_NODE_GPUS}"
    words = (node.kind, node.partition, node.domain, node.leaf, node.pod, node.rack, *node.features)
    if len(node.features) > 64 or any(len(word) > 128 for word in words):
        return "at most 64 features, and names of at most 128 letters"
    return ""


async def _let_in(hub: Hub, register: Register, connection: Connection) -> Connection | None:
    """Gives the node its number (a new one is an event of the log) and says welcome."""
    fleet, clock = hub.controller.core.view.fleet, hub.controller.clock
    if register.node.name not in fleet.index:
        joined = NodeJoined(
            node=register.node, inventory=register.inventory, healthy=register.healthy
        )
        try:
            await hub.controller.order(joined)
        except UnavailableError:
            return None
    node = fleet.index[register.node.name]
    now = clock.now_ns()
    skew = register.clock_ns - now
    hub.skew_ns[node] = skew
    hub.stores[node] = register.store
    if abs(skew) > SKEW_NS:
        logger.warning(
            "the clock of %s is %.0f s %s; its times are corrected, but set its clock",
            register.node.name,
            abs(skew) / 1e9,
            "ahead" if skew > 0 else "behind",
        )
    connection.node = node
    welcome = Welcome(
        node=node,
        epoch=hub.controller.epoch,
        heartbeat_ns=hub.timeouts.heartbeat_ns,
        lease_ns=hub.timeouts.lease_ns,
        version=__version__,
        clock_ns=now,
    )
    connection.push(framed(encode(welcome)))
    hub.connect(connection, register.inventory.incarnation)
    return connection


async def _listen(hub: Hub, connection: Connection, receive: Receive) -> None:
    def take(data: bytes) -> None:
        try:
            hub.receive(connection, decode_up(data))
        except msgspec.MsgspecError as error:
            text = f"a message cannot be read: {error}"
            connection.close(hub.rejected("protocol", text))

    if connection.socket is not None:
        connection.socket.direct = take
    try:
        while True:
            message = await receive()
            if message["type"] == "websocket.disconnect":
                return
            take(message.get("bytes") or b"")
    finally:
        hub.disconnect(connection)
