"""Who is let in on ``/v1/agent``: an agent's first words, checked, and the welcome."""

from __future__ import annotations

import hmac
import logging
import re
from typing import TYPE_CHECKING

from phalanx import __version__
from phalanx.cluster.node import MOST_NODE_GPUS, Node, places_of
from phalanx.cluster.node import bad_node as unusable
from phalanx.cluster.protocol.events import NodeJoined
from phalanx.control.server.security.auth import Token
from phalanx.control.trust.node_key import (
    NodeClaim,
    claim_proof,
    fingerprint,
    is_public_key,
    link_key,
    proved,
)
from phalanx.control.wire.agent_messages import (
    PROTOCOL,
    Register,
    RejectCode,
    Rejected,
    Welcome,
    encode,
)
from phalanx.control.wire.websocket_frames import framed
from phalanx.hardware.probe.description import bad_description

if TYPE_CHECKING:
    from phalanx.control.server.agent_link.connection import AgentSocket
    from phalanx.control.server.agent_link.connections import Hub

logger = logging.getLogger("phalanx.server")

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
SKEW_NS = 30 * 10**9  # a clock that is further off is worth a warning
MOST_NUMBER = 1 << 53
REVOKED = "this node's token was revoked: join again"


def bad_register(hub: Hub, token: Token, register: Register, nonce: bytes) -> Rejected | None:
    """Why an agent is not let in; None where nothing is against it."""
    ours, theirs = __version__, register.version
    if register.protocol != PROTOCOL:
        text = (
            f"the agent speaks protocol {register.protocol} (phalanx {theirs}), the server "
            f"protocol {PROTOCOL} (phalanx {ours}): install the same version on both"
        )
        return hub.rejected(RejectCode.PROTOCOL, text)
    if theirs.split(".")[:2] != ours.split(".")[:2]:
        text = f"the agent is phalanx {theirs}, the server phalanx {ours}: install {ours} there"
        return hub.rejected(RejectCode.VERSION, text)
    if (register.node.name, register.machine) != (token.node, token.machine):
        text = (
            f"the state folder of this agent belongs to node {token.node} of the machine that "
            f"joined with it, not to {register.node.name} here: start it with --name "
            f"{token.node} there, or with another --state"
        )
        return hub.rejected(RejectCode.WRONG_NODE, text)
    if refused := _unproved(hub, token, register, nonce):
        return refused
    if token.pending:
        text = (
            f"{token.node} waits to be let in: `phalanx nodes approve {token.node}` (its key is "
            f"{fingerprint(token.key)})"
        )
        return hub.rejected(RejectCode.PENDING, text, retry=True)
    known = hub.controller.core.view.fleet.index.get(register.node.name)
    before = hub.connections.get(known) if known is not None else None
    if before is not None and before.machine != register.machine:
        return hub.rejected(RejectCode.NAME_TAKEN, name_taken(register.node.name))
    problem = bad_node(register.node) or bad_description(register.description)
    return hub.rejected(RejectCode.BAD_NODE, problem) if problem else None


def _unproved(hub: Hub, token: Token, register: Register, nonce: bytes) -> Rejected | None:
    """Why an agent has not shown that it is its node's; None: it has.

    The token of a node that joined before nodes had keys is bound to the first that is shown.
    """
    key = token.key or register.key
    asked = NodeClaim(nonce, hub.key.public, token.node, token.machine)
    if register.linked and token.key and not token.unconfirmed:
        wanted = claim_proof(link_key(hub.link_secret, token.id, key), asked)
        if hmac.compare_digest(wanted, register.proof):
            return None
        return hub.rejected(
            RejectCode.UNLINKED, "show your key: the link key is not known", retry=True
        )
    if is_public_key(key) and key == register.key and proved(hub.key, key, register.proof, asked):
        return None
    text = (
        f"this agent does not have the key that {token.node} joined with: where the node was "
        "installed anew, remove agent.token from its state folder and join again"
    )
    return hub.rejected(RejectCode.WRONG_KEY, text)


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
    wrong = unusable(node)
    if wrong is not None:
        return str(wrong)
    if not 0 <= node.gpus <= MOST_NODE_GPUS:
        return f"gpus = {node.gpus}: a node has 0 to {MOST_NODE_GPUS}"
    for key in ("cpus", "memory_bytes"):
        if not 0 <= getattr(node, key) <= MOST_NUMBER:
            return f"{key} = {getattr(node, key)}: must be 0 to {MOST_NUMBER}"
    if not 1 <= node.rails <= MOST_NODE_GPUS:
        return f"rails = {node.rails}: a node has 1 to {MOST_NODE_GPUS}"
    words = (node.kind, node.partition, *places_of(node).values(), *node.features)
    if len(node.features) > 64 or any(len(word) > 128 for word in words):
        return "at most 64 features, and names of at most 128 letters"
    return ""


def is_known(hub: Hub, register: Register) -> bool:
    """Whether the core has this very node; one that changed joins again."""
    fleet = hub.controller.core.view.fleet
    known = fleet.index.get(register.node.name)
    return known is not None and fleet.nodes[known] == register.node


def new_node(register: Register) -> NodeJoined:
    """The event of a node that nobody knew, or that is not what it was."""
    return NodeJoined(node=register.node, inventory=register.inventory, healthy=register.healthy)


def let_in(hub: Hub, token: Token, register: Register, connection: AgentSocket) -> None:
    """Says welcome to a node that has its number."""
    fleet, clock = hub.controller.core.view.fleet, hub.controller.clock
    node = fleet.index[register.node.name]
    now = clock.now_ns()
    skew = register.clock_ns - now
    hub.skew_ns[node] = skew
    hub.stores[node] = register.store
    hub.describe(node, register.description)
    if abs(skew) > SKEW_NS:
        logger.warning(
            "the clock of %s is %.0f s %s; its times are corrected, but set its clock",
            register.node.name,
            abs(skew) / 1e9,
            "ahead" if skew > 0 else "behind",
        )
    connection.node, connection.machine, connection.token = node, register.machine, token.id
    welcome = Welcome(
        node=node,
        epoch=hub.controller.epoch,
        heartbeat_ns=hub.timeouts.heartbeat_ns,
        lease_ns=hub.timeouts.lease_ns,
        silent_ns=hub.timeouts.silent_ns,
        program_lease_ns=hub.timeouts.program_lease_ns,
        version=__version__,
        clock_ns=now,
        link=link_key(hub.link_secret, token.id, token.key),
    )
    connection.push(framed(encode(welcome)))
    hub.connect(connection, register.inventory.incarnation)
