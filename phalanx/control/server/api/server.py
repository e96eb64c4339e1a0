"""Endpoints about the server itself: its status, tokens, and agents that join."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import msgspec

from phalanx import __version__
from phalanx.cluster.ledger.report import report
from phalanx.cluster.node import NodeState
from phalanx.control.server.agent_link.handshake import NAME, name_taken
from phalanx.control.server.http.endpoints import ADMIN, EVERYBODY, ApiError, Call, Endpoints
from phalanx.control.server.http.live import QUIET
from phalanx.control.server.http.views import notice_out, questions, team_of, usual_node_gpus
from phalanx.control.server.security.auth import JOIN_HOURS, Token, Tokens
from phalanx.control.server.security.joining import (
    JoinAsked,
    NameTakenError,
    is_network,
    refuse_elsewhere,
)
from phalanx.control.trust.node_key import fingerprint, is_public_key
from phalanx.control.wire import api_types as t
from phalanx.control.wire.agent_messages import JoinAnswer, JoinRequest
from phalanx.control.wire.api_types import Role

ENDPOINTS = Endpoints()


@ENDPOINTS.add("GET /v1/status", EVERYBODY)
async def status(call: Call) -> t.Status:
    """Show the fleet at a glance."""
    leading = call.leading
    core, fleet = leading.core, leading.core.view.fleet
    states = Counter(fleet.columns.state.tolist())
    jobs = Counter(str(job.state) for job in core.view.jobs.values() if call.sees(job.spec.team))
    notices = [
        notice_out(core, notice)
        for notice in leading.controller.memory.notices[-50:]
        if not notice.job or call.sees(team_of(core, notice.job))
    ]
    return t.Status(
        version=__version__,
        leader=True,
        epoch=leading.controller.epoch,
        sequence=core.sequence,
        time_ns=leading.controller.clock.now_ns(),
        nodes={state.name.lower(): states.get(int(state), 0) for state in NodeState},
        connected=len(leading.hub.connections),
        gpus=fleet.total_gpus,
        free_gpus=fleet.idle_gpus[NodeState.HEALTHY],
        node_gpus=usual_node_gpus(fleet),
        jobs=dict(jobs),
        problem=leading.controller.problem,
        starting=not call.server.complete.is_set(),
        notices=notices,
        questions=questions(core),
    )


@ENDPOINTS.add("GET /v1/ledger", EVERYBODY)
async def ledger(call: Call) -> t.LedgerOut:
    """Show where GPU time went: exact buckets by job, team and cause.

    As far as the caller may see.
    """
    core = call.leading.core
    totals = report(core.ledger, core.view.policy.price)
    return t.LedgerOut(
        fleet=totals.fleet if not call.token.team else None,
        teams={team: share for team, share in totals.teams.items() if call.sees(team)},
        jobs={job: share for job, share in totals.jobs.items() if call.sees(team_of(core, job))},
    )


@ENDPOINTS.add("GET /v1/whoami", EVERYBODY)
async def whoami(call: Call) -> t.Whoami:
    """Give the role and team of the caller's token."""
    return t.Whoami(token=token_out(call.token))


def token_out(token: Token) -> t.TokenOut:
    """A token's record, without what it was made of."""
    return msgspec.convert(token, t.TokenOut, from_attributes=True)


@ENDPOINTS.add("GET /v1/tokens", ADMIN)
async def list_tokens(call: Call) -> t.TokenList:
    """List tokens (never the secrets)."""
    return t.TokenList(tokens=[token_out(token) for token in call.leading.tokens.all()])


@ENDPOINTS.add("POST /v1/tokens", ADMIN, body=t.TokenIn, status=201, audited=True)
async def create_token(call: Call) -> t.NewToken:
    """Create a token; its secret is returned only once.

    One for agents is a join token: each agent gets its own for it.
    """
    body = call.body
    role: Role = "join" if body.role == "agent" else body.role
    hours = body.hours or (JOIN_HOURS if role == "join" else 0.0)
    team = body.team or ("default" if role == "user" else "")
    more: dict[str, Any] = {}
    if role == "join":
        more = {"uses": body.uses, "network": body.network, "approves": body.approves}
    elif body.uses or body.network or not body.approves:
        raise ApiError(409, "bad_token", "uses, network and approves are for agents' tokens")
    if body.network and not is_network(body.network):
        text = f"{body.network!r} is no network: use 10.0.0.0/8, or one address"
        raise ApiError(409, "bad_token", text)
    secret, token = await call.server.read(
        lambda: call.leading.tokens.create(role, body.name, team=team, hours=hours, **more)
    )
    return t.NewToken(secret=secret, token=token_out(token))


@ENDPOINTS.add("DELETE /v1/tokens/{token}", ADMIN, params=t.TokenPath, audited=True)
async def revoke_token(call: Call) -> t.Whoami:
    """Revoke a token."""
    token = await call.server.read(call.leading.tokens.revoke, call.path.token)
    if token is None:
        raise ApiError(404, "no_such_token", f"there is no token {call.path.token}")
    call.leading.push(QUIET)  # whoever listens with it is cut off
    call.leading.hub.cut(token.id)
    return t.Whoami(token=token_out(token))


@ENDPOINTS.add("POST /v1/join", ("join",), body=JoinRequest, status=201, audited=True)
async def join(call: Call) -> JoinAnswer:
    """Exchange a join token for the token of one node's agent."""
    name, machine, key = call.body.name, call.body.machine, call.body.key
    if not NAME.fullmatch(name) or not 8 <= len(machine) <= 128:
        text = f"{name[:128]!r} is no name of a node: letters, digits, dots and dashes (--name)"
        raise ApiError(400, "bad_request", text)
    if not is_public_key(key):
        raise ApiError(400, "bad_request", "key: the node's public key, 64 hexadecimal digits")
    refuse_elsewhere(call.token, call.client)
    hub, fleet = call.leading.hub, call.leading.core.view.fleet
    connected = fleet.index.get(name, -1) in hub.connections
    try:
        asked = JoinAsked(call.token, name, machine, key, connected)
        secret, token = await call.leading.joining.join(asked)
    except NameTakenError:
        raise ApiError(409, "name_taken", name_taken(name)) from None
    hub.key.agreement.prepare(bytes.fromhex(key))
    return JoinAnswer(
        token=secret,
        version=__version__,
        server_key=hub.key.public.hex(),
        pending=token.pending,
    )


@ENDPOINTS.add("GET /v1/authority", ())
async def authority(call: Call) -> t.AuthorityOut:
    """Give the certificate of the cluster's own authority.

    For clients that know its fingerprint.
    """
    found = call.server.authority
    if found is None:
        raise ApiError(404, "no_authority", "this server has no authority of its own")
    return t.AuthorityOut(pem=found.pem, fingerprint=found.fingerprint)


@ENDPOINTS.add("GET /v1/pending-nodes", ADMIN)
async def pending_nodes(call: Call) -> t.PendingList:
    """List machines that wait for approval as nodes."""
    leading = call.leading
    return t.PendingList(
        nodes=[_pending(leading.tokens, each) for each in leading.joining.pending()]
    )


def _pending(tokens: Tokens, token: Token) -> t.PendingNode:
    return t.PendingNode(
        name=token.node,
        key=fingerprint(token.key),
        known=tokens.agent_of(token.node) is not None,
        since_ns=token.created_ns,
    )


@ENDPOINTS.add(
    "POST /v1/pending-nodes/{node}/approve",
    ADMIN,
    params=t.NodePath,
    body=t.DecideNode,
    audited=True,
)
async def approve_node(call: Call) -> t.PendingList:
    """Approve a machine as a node.

    One that was a node of this name before is none any more.
    """
    return await _decide(call, approve=True)


@ENDPOINTS.add(
    "POST /v1/pending-nodes/{node}/reject",
    ADMIN,
    params=t.NodePath,
    body=t.DecideNode,
    audited=True,
)
async def reject_node(call: Call) -> t.PendingList:
    """Reject a machine that asks to be a node."""
    return await _decide(call, approve=False)


async def _decide(call: Call, *, approve: bool) -> t.PendingList:
    leading, name = call.leading, call.path.node
    decide = partial(leading.joining.decide, name, call.body.key, approve=approve)
    before = leading.tokens.agent_of(name)
    decided = await call.server.read(decide)
    if not decided:
        raise ApiError(404, "no_such_node", f"no machine waits to be {name}")
    if approve and before is not None and before.id not in {token.id for token in decided}:
        await call.server.read(leading.tokens.revoke, before.id)
        leading.hub.cut(before.id)
    return t.PendingList(nodes=[_pending(leading.tokens, token) for token in decided])
