"""Endpoints about nodes, quotas, reservations and what a person must decide."""

from __future__ import annotations

from phalanx.cluster.protocol.events import (
    Answer,
    Defragment,
    DrainNode,
    NodeRepaired,
    QuarantineNode,
    ReadmitNode,
    SetQuota,
    SetReservation,
)
from phalanx.control.server.http.endpoints import ADMIN, EVERYBODY, ApiError, Call, Endpoint
from phalanx.control.server.http.views import (
    failure_rate,
    names_of,
    node_history,
    node_out,
    questions,
    quotas,
)
from phalanx.control.wire import api_types as t


def _out(call: Call, node: int) -> t.NodeOut:
    hub = call.leading.hub
    skew = hub.skew_ns.get(node, 0)
    return node_out(call.leading.core, node, node in hub.connections, skew, call.sees)


async def list_nodes(call: Call) -> t.NodeList:
    """Nodes in the order of their numbers."""
    fleet, query = call.leading.core.view.fleet, call.query
    listed: list[t.NodeOut] = []
    for node in range(query.after + 1, len(fleet)):
        if query.state not in ("all", fleet.state(node).name.lower()):
            continue
        if len(listed) == query.limit:
            return t.NodeList(nodes=listed, next_after=listed[-1].number)
        listed.append(_out(call, node))
    return t.NodeList(nodes=listed, next_after=-1)


async def show_node(call: Call) -> t.NodeDetail:
    """One node and what became of it."""
    node = call.node()
    return t.NodeDetail(node=_out(call, node), history=node_history(call.leading.core, node))


async def failure_rates(call: Call) -> t.FailureRates:
    """How often nodes of each kind fail here, with what that is known from."""
    now_ns = call.leading.controller.clock.now_ns()
    return t.FailureRates(rates=[failure_rate(each) for each in call.leading.core.failures(now_ns)])


async def drain(call: Call) -> t.Done:
    """Empties a node."""
    seconds = call.body.deadline_seconds
    deadline = call.leading.controller.clock.now_ns() + seconds * 10**9 if seconds else 0
    return await call.order(DrainNode(node=call.node(), deadline_ns=deadline))


async def readmit(call: Call) -> t.Done:
    """Gives a node back to the fleet."""
    return await call.order(ReadmitNode(node=call.node(), tested=call.body.tested))


async def quarantine(call: Call) -> t.Done:
    """Takes a node out of the fleet."""
    return await call.order(QuarantineNode(node=call.node()))


async def repaired(call: Call) -> t.Done:
    """Somebody repaired a node: its past counts no more."""
    return await call.order(NodeRepaired(node=call.node()))


async def list_quotas(call: Call) -> t.QuotaList:
    """What teams own and use."""
    return t.QuotaList(quotas=quotas(call.leading.core, call.sees))


async def set_quota(call: Call) -> t.Done:
    """Gives a team a quota."""
    body = call.body
    order = SetQuota(team=call.path.team, gpus=body.gpus, ceiling=body.ceiling, weight=body.weight)
    return await call.order(order)


async def list_reservations(call: Call) -> t.ReservationList:
    """Nodes kept for a time."""
    view = call.leading.core.view
    listed = [
        t.ReservationOut(
            name=each.name,
            start_ns=each.start_ns,
            end_ns=each.end_ns,
            nodes=names_of(view.fleet, each.nodes),
            gpus=each.gpus,
            teams=each.teams,
        )
        for each in view.reservations.values()
    ]
    return t.ReservationList(reservations=listed)


async def set_reservation(call: Call) -> t.Done:
    """Keeps nodes for a time."""
    body = call.body
    order = SetReservation(
        name=call.path.name,
        start_ns=body.start_ns,
        end_ns=body.end_ns,
        nodes=tuple(call.node_number(name) for name in body.nodes),
        gpus=body.gpus,
        teams=body.teams,
    )
    return await call.order(order)


async def answer(call: Call) -> t.Done:
    """Answers a question of the core."""
    known = {each.question for each in questions(call.leading.core)}
    if call.path.question not in known:
        raise ApiError(404, "no_such_question", f"question {call.path.question} is not open")
    order = Answer(question=call.path.question, approve=call.body.approve, by=call.token.name)
    return await call.order(order)


async def defragment(call: Call) -> t.Moves:
    """Which moves would make room for large gangs. Nothing is moved."""
    outcome = await call.leading.controller.order(Defragment())
    fleet = call.leading.core.view.fleet
    return t.Moves(
        moves=[
            t.Move(job=job, source=fleet.nodes[source].name, target=fleet.nodes[target].name)
            for job, source, target in outcome.moves
        ]
    )


def _node(name: str, summary: str, handler: object, body: object = None) -> Endpoint:
    return Endpoint(
        method="POST",
        path=f"/v1/nodes/{{node}}/{name}",
        name=f"{name}_node",
        summary=summary,
        roles=ADMIN,
        handler=handler,  # type: ignore[arg-type]
        answer=t.Done,
        params=t.NodePath,
        body=body,
        audited=True,
    )


ENDPOINTS = [
    Endpoint(
        method="GET",
        path="/v1/nodes",
        name="list_nodes",
        summary="List nodes.",
        roles=EVERYBODY,
        handler=list_nodes,
        answer=t.NodeList,
        query=t.NodesQuery,
    ),
    Endpoint(
        method="GET",
        path="/v1/nodes/{node}",
        name="show_node",
        summary="Show a node and its history.",
        roles=EVERYBODY,
        handler=show_node,
        answer=t.NodeDetail,
        params=t.NodePath,
    ),
    Endpoint(
        method="GET",
        path="/v1/failure-rates",
        name="failure_rates",
        summary="Say how often nodes fail here, by kind.",
        roles=EVERYBODY,
        handler=failure_rates,
        answer=t.FailureRates,
    ),
    _node("drain", "Empty a node and give it no new work.", drain, t.Drain),
    _node("readmit", "Give a node back to the fleet, after a test.", readmit, t.Readmit),
    _node("quarantine", "Take a node out of the fleet.", quarantine),
    _node("repaired", "Say that a node was repaired.", repaired),
    Endpoint(
        method="GET",
        path="/v1/quotas",
        name="list_quotas",
        summary="List what teams own and use.",
        roles=EVERYBODY,
        handler=list_quotas,
        answer=t.QuotaList,
    ),
    Endpoint(
        method="PUT",
        path="/v1/quotas/{team}",
        name="set_quota",
        summary="Give a team a quota.",
        roles=ADMIN,
        handler=set_quota,
        answer=t.Done,
        params=t.TeamPath,
        body=t.QuotaIn,
        audited=True,
    ),
    Endpoint(
        method="GET",
        path="/v1/reservations",
        name="list_reservations",
        summary="List reservations.",
        roles=EVERYBODY,
        handler=list_reservations,
        answer=t.ReservationList,
    ),
    Endpoint(
        method="PUT",
        path="/v1/reservations/{name}",
        name="set_reservation",
        summary="Keep nodes for teams or for maintenance for a time.",
        roles=ADMIN,
        handler=set_reservation,
        answer=t.Done,
        params=t.NamePath,
        body=t.ReservationIn,
        audited=True,
    ),
    Endpoint(
        method="POST",
        path="/v1/questions/{question}",
        name="answer_question",
        summary="Answer a question of the core.",
        roles=ADMIN,
        handler=answer,
        answer=t.Done,
        params=t.QuestionPath,
        body=t.Decision,
        audited=True,
    ),
    Endpoint(
        method="POST",
        path="/v1/defragment",
        name="defragment",
        summary="Ask which moves would make room for large gangs.",
        roles=ADMIN,
        handler=defragment,
        answer=t.Moves,
        audited=True,
    ),
]
