"""Endpoints about the server itself: its status, tokens, and agents that join."""

from __future__ import annotations

from collections import Counter

from phalanx import __version__
from phalanx.cluster.fleet import NodeState
from phalanx.cluster.report import report
from phalanx.control import api_types as t
from phalanx.control.agent_endpoint import NAME, name_taken
from phalanx.control.auth import JOIN_HOURS, Role, Token
from phalanx.control.endpoints import ADMIN, EVERYBODY, ApiError, Call, Endpoint
from phalanx.control.live import QUIET
from phalanx.control.views import notice_out, questions, team_of
from phalanx.control.wire import JoinAnswer, JoinRequest


async def status(call: Call) -> t.Status:
    """The fleet at a glance."""
    leading = call.leading
    core, fleet = leading.core, leading.core.view.fleet
    states = Counter(fleet.columns.state.tolist())
    sizes = Counter(fleet.columns.gpus.tolist())
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
        node_gpus=sizes.most_common(1)[0][0] if sizes else 0,
        jobs=dict(jobs),
        problem=leading.controller.problem,
        starting=not call.server.complete.is_set(),
        notices=notices,
        questions=questions(core),
    )


async def ledger(call: Call) -> t.LedgerOut:
    """Where the GPU time went, as far as the caller may see."""
    core = call.leading.core
    found = report(core.ledger, core.view.policy.price)
    return t.LedgerOut(
        fleet=found.fleet if not call.token.team else None,
        teams={team: share for team, share in found.teams.items() if call.sees(team)},
        jobs={job: share for job, share in found.jobs.items() if call.sees(team_of(core, job))},
    )


async def whoami(call: Call) -> t.Whoami:
    """What the caller's token is good for."""
    return t.Whoami(token=token_out(call.token))


def token_out(token: Token) -> t.TokenOut:
    """A token's record, without what it was made of."""
    return t.TokenOut(
        id=token.id,
        name=token.name,
        role=token.role,
        team=token.team,
        node=token.node,
        created_ns=token.created_ns,
        expires_ns=token.expires_ns,
        revoked=token.revoked,
    )


async def list_tokens(call: Call) -> t.TokenList:
    """Every token's record."""
    return t.TokenList(tokens=[token_out(token) for token in call.leading.tokens.all()])


async def create_token(call: Call) -> t.NewToken:
    """A new token. One for agents is a join token: each agent gets its own for it."""
    body = call.body
    role: Role = "join" if body.role == "agent" else body.role
    hours = body.hours or (JOIN_HOURS if role == "join" else 0.0)
    team = body.team or ("default" if role == "user" else "")
    secret, token = await call.server.read(
        lambda: call.leading.tokens.create(role, body.name, team=team, hours=hours)
    )
    return t.NewToken(secret=secret, token=token_out(token))


async def revoke_token(call: Call) -> t.Whoami:
    """Makes a token worthless."""
    token = await call.server.read(call.leading.tokens.revoke, call.path.token)
    if token is None:
        raise ApiError(404, "no_such_token", f"there is no token {call.path.token}")
    call.leading.push(QUIET)  # whoever listens with it is cut off
    return t.Whoami(token=token_out(token))


async def join(call: Call) -> JoinAnswer:
    """An agent's own token, for a join token."""
    name, machine = call.body.name, call.body.machine
    if not NAME.fullmatch(name) or not 8 <= len(machine) <= 128:
        text = f"{name[:128]!r} is no name of a node: letters, digits, dots and dashes (--name)"
        raise ApiError(400, "bad_request", text)
    hub, fleet = call.leading.hub, call.leading.core.view.fleet
    known = hub.connections.get(fleet.index.get(name, -1))
    if known is not None and known.machine != machine:
        raise ApiError(409, "name_taken", name_taken(name))
    await call.server.read(call.leading.tokens.revoke_node, name)
    secret, _ = await call.server.read(
        lambda: call.leading.tokens.create("agent", name, node=name, machine=machine)
    )
    return JoinAnswer(token=secret, version=__version__)


ENDPOINTS = [
    Endpoint(
        method="GET",
        path="/v1/status",
        name="status",
        summary="Show the fleet at a glance.",
        roles=EVERYBODY,
        handler=status,
        answer=t.Status,
    ),
    Endpoint(
        method="GET",
        path="/v1/ledger",
        name="ledger",
        summary="Say where the GPU time went: exact buckets by job, team and cause.",
        roles=EVERYBODY,
        handler=ledger,
        answer=t.LedgerOut,
    ),
    Endpoint(
        method="GET",
        path="/v1/whoami",
        name="whoami",
        summary="Say what the caller's token is good for.",
        roles=EVERYBODY,
        handler=whoami,
        answer=t.Whoami,
    ),
    Endpoint(
        method="GET",
        path="/v1/tokens",
        name="list_tokens",
        summary="List tokens (never the secrets).",
        roles=ADMIN,
        handler=list_tokens,
        answer=t.TokenList,
    ),
    Endpoint(
        method="POST",
        path="/v1/tokens",
        name="create_token",
        summary="Make a token; its secret is told this once.",
        roles=ADMIN,
        handler=create_token,
        answer=t.NewToken,
        body=t.TokenIn,
        status=201,
        audited=True,
    ),
    Endpoint(
        method="DELETE",
        path="/v1/tokens/{token}",
        name="revoke_token",
        summary="Make a token worthless.",
        roles=ADMIN,
        handler=revoke_token,
        answer=t.Whoami,
        params=t.TokenPath,
        audited=True,
    ),
    Endpoint(
        method="POST",
        path="/v1/join",
        name="join",
        summary="Exchange a join token for the token of one node's agent.",
        roles=("join",),
        handler=join,
        answer=JoinAnswer,
        body=JoinRequest,
        status=201,
        audited=True,
    ),
]
