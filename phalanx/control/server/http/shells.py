"""``/v1/jobs/{job}/shell``: a terminal in a job's environment on a node, for its own user.

The server passes bytes on between the caller's WebSocket and the agent's; who opened one, where
and for how long stands in the audit log.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta, Struct
from starlette.websockets import WebSocket, WebSocketDisconnect

from phalanx.cluster.jobs.job import ClusterJob
from phalanx.control.server.http.endpoints import WRITERS
from phalanx.control.server.http.work_check import MOST_WORDS
from phalanx.control.server.security.auth import AuthError, Token, bearer, may_see, require
from phalanx.control.server.security.sessions import ENDED, until_over
from phalanx.control.wire.agent_messages import encode
from phalanx.control.wire.api_types import RefusalCode
from phalanx.control.wire.shell_messages import (
    MOST_UNREAD,
    CloseShell,
    OpenShell,
    ShellInput,
    ShellOutput,
)
from phalanx.control.wire.websocket_frames import framed

if TYPE_CHECKING:
    from phalanx.control.server.leading import Leading
    from phalanx.control.server.process import Server

FIRST_SECONDS = 5.0
REFUSED = 4403
PIECE_BYTES = 64 << 10  # of input in one message
MOST_DIGITS = 18  # of a job's number
Cells = Annotated[int, Meta(ge=0, le=10_000)]  # of a terminal, in one direction


class ShellRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """First message of the caller."""

    node: Annotated[str, Meta(max_length=128)] = ""  # "": the job's first
    argv: Annotated[tuple[str, ...], Meta(max_length=MOST_WORDS)] = ()
    rows: Cells = 24
    columns: Cells = 80
    terminal: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._+-]{0,64}$")] = "xterm"


class Size(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A later text message of the caller: its window has another size."""

    rows: Cells
    columns: Cells


class ShellSessions:
    """Shells that are open, by number. ``push`` sends a frame to a node if it is connected."""

    def __init__(
        self, push: Callable[[int, bytes], bool], signed: Callable[[OpenShell], bytes]
    ) -> None:
        self._push, self._signed = push, signed
        self._next = 1
        self._open: dict[int, tuple[int, asyncio.Queue[ShellOutput]]] = {}

    def open(self, node: int, order: OpenShell) -> asyncio.Queue[ShellOutput] | None:
        """Start one; None where the node is not connected."""
        pieces: asyncio.Queue[ShellOutput] = asyncio.Queue(MOST_UNREAD + 8)
        self._open[order.request] = node, pieces
        return pieces if self.send(node, order) else None

    def number(self) -> int:
        """For the next shell."""
        number, self._next = self._next, self._next + 1
        return number

    def send(self, node: int, order: OpenShell | ShellInput | CloseShell) -> bool:
        """Something for the shell."""
        if isinstance(order, OpenShell):
            return self._push(node, self._signed(order))
        return self._push(node, framed(encode(order)))

    def close(self, node: int, request: int) -> None:
        """Nobody is there any more."""
        if self._open.pop(request, None) is not None:
            self.send(node, CloseShell(request=request))

    def receive(self, node: int, piece: ShellOutput) -> None:
        """Output of a shell."""
        session = self._open.get(piece.request)
        if session is None or session[0] != node:
            if not piece.end:
                self.send(node, CloseShell(request=piece.request))
            return
        try:
            session[1].put_nowait(piece)
        except asyncio.QueueFull:  # an agent that does not wait to be read
            self.close(node, piece.request)

    def lost(self, node: int) -> None:
        """A node's connection broke: its shells are over."""
        for request, (of, pieces) in list(self._open.items()):
            if of == node:
                while pieces.full():
                    pieces.get_nowait()
                problem = "the connection to the node is gone"
                over = ShellOutput(request=request, end=True, status=1, problem=problem)
                pieces.put_nowait(over)


async def serve_shell(server: Server, socket: WebSocket) -> None:
    """One shell, from its first message to its end."""
    await socket.accept()
    client = socket.client.host if socket.client else ""
    action, began = f"shell {socket.url.path}", time.monotonic()
    token: Token | None = None

    def note(status: int, detail: str) -> None:
        server.audit.write(
            action,
            status,
            token=token.id if token else "",
            name=token.name if token else "",
            role=token.role if token else "",
            client=client,
            detail=detail[:500],
        )

    try:
        leading = server.leading_or_refuse()
        token = leading.tokens.check(bearer(socket.headers.get("authorization")))
        require(token, WRITERS)
        async with asyncio.timeout(FIRST_SECONDS):
            wanted = msgspec.json.decode(await socket.receive_text(), type=ShellRequest)
        job = _job(leading, token, socket.path_params["job"])
        node = _node(leading, job, wanted.node)
    except AuthError as error:
        note(error.status, error.code)
        await socket.close(REFUSED, str(error)[:120])
        return
    except (msgspec.MsgspecError, TimeoutError, KeyError) as error:
        await socket.close(REFUSED, f"the first message cannot be read: {error}"[:120])
        return
    except WebSocketDisconnect:
        return
    name = leading.core.view.fleet.nodes[node].name
    note(101, f"opened on {name}: {' '.join(wanted.argv) or 'a shell'}")
    status = await _serve(leading, token, socket, job, node, wanted)
    note(200, f"closed on {name} after {time.monotonic() - began:.0f} s with {status}")


def _job(leading: Leading, token: Token, number: str) -> ClusterJob:
    known = number.isascii() and number.isdigit() and len(number) <= MOST_DIGITS
    job = leading.core.view.jobs.get(int(number)) if known else None
    if job is None or not may_see(token, job.spec.team):
        raise AuthError(404, "no_such_job", f"there is no job {number}")
    if token.role != "admin" and token.name != job.spec.user:
        # It is a shell of that user: a team shares its jobs, and nobody's account.
        raise AuthError(403, "wrong_user", f"job {number} is {job.spec.user}'s, not {token.name}'s")
    return job


def _node(leading: Leading, job: ClusterJob, name: str) -> int:
    nodes = job.placement.nodes if job.placement is not None else ()
    if not nodes:
        raise AuthError(409, RefusalCode.NOT_RUNNING, f"job {job.id} runs nowhere now")
    fleet = leading.core.view.fleet
    if not name:
        return nodes[0]
    number = fleet.index.get(name)
    if number not in nodes:
        known = ", ".join(fleet.nodes[node].name for node in nodes[:8])
        raise AuthError(404, "no_such_node", f"job {job.id} is not on {name}, but on {known}")
    assert number is not None
    return number


async def _serve(
    leading: Leading,
    token: Token,
    socket: WebSocket,
    job: ClusterJob,
    node: int,
    wanted: ShellRequest,
) -> int:
    shells = leading.hub.shells
    request = shells.number()
    order = OpenShell(
        request=request,
        job=job.id,
        argv=wanted.argv,
        rows=wanted.rows,
        columns=wanted.columns,
        terminal=wanted.terminal,
    )
    pieces = shells.open(node, order)
    if pieces is None:
        shells.close(node, request)
        await socket.close(REFUSED, "the node is not connected")
        return 1
    typing = asyncio.ensure_future(_pass_input(shells, socket, node, request))
    over = asyncio.ensure_future(until_over(leading.tokens, token.id))
    status = 1
    try:
        while True:
            getting = asyncio.ensure_future(pieces.get())
            await asyncio.wait([getting, typing, over], return_when=asyncio.FIRST_COMPLETED)
            if over.done():
                getting.cancel()
                await _send_end(socket, status, ENDED)
                await socket.close(REFUSED, ENDED)
                return status
            if not getting.done():
                getting.cancel()
                return status  # the caller is gone
            piece = getting.result()
            if piece.data:
                await socket.send_bytes(piece.data)
                shells.send(node, ShellInput(request=request, read=1))
            if piece.end:
                status = piece.status
                await _send_end(socket, status, piece.problem)
                await socket.close()
                return status
    except (WebSocketDisconnect, RuntimeError):
        return status
    finally:
        typing.cancel()
        over.cancel()
        shells.close(node, request)


async def _send_end(socket: WebSocket, status: int, problem: str) -> None:
    last = {"status": status, "problem": problem}
    await socket.send_text(msgspec.json.encode(last).decode())


async def _pass_input(shells: ShellSessions, socket: WebSocket, node: int, request: int) -> None:
    try:
        while True:
            message = await socket.receive()
            if message["type"] == "websocket.disconnect":
                return
            if (data := message.get("bytes")) is not None:
                for start in range(0, len(data), PIECE_BYTES):
                    piece = data[start : start + PIECE_BYTES]
                    shells.send(node, ShellInput(request=request, data=piece))
            elif (text := message.get("text")) is not None:
                size = msgspec.json.decode(text, type=Size)
                order = ShellInput(request=request, rows=size.rows, columns=size.columns)
                shells.send(node, order)
    except (WebSocketDisconnect, RuntimeError, msgspec.MsgspecError):
        return
