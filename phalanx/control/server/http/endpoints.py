"""Endpoints: what each takes, gives and needs. Routes and OpenAPI come from it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from msgspec import Struct

from phalanx.cluster.jobs.job import ClusterJob
from phalanx.cluster.protocol.events import EventBody
from phalanx.control.server.controller import ReusedError
from phalanx.control.server.helper_process import BusyError, TooLongError
from phalanx.control.server.security.auth import AuthError, Token, may_see
from phalanx.control.wire.api_types import Done, Role

if TYPE_CHECKING:
    from phalanx.control.server.leading import Leading
    from phalanx.control.server.process import Server

T = TypeVar("T")

EVERYBODY: tuple[Role, ...] = ("admin", "user", "read")
WRITERS: tuple[Role, ...] = ("admin", "user")
ADMIN: tuple[Role, ...] = ("admin",)


class ApiError(Exception):
    """A refusal with its status."""

    def __init__(self, status: int, code: str, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.status, self.code, self.retry_after = status, code, retry_after


class Call(Struct):
    """One request, checked and decoded."""

    server: Server
    leading: Leading
    token: Token
    path: Any
    query: Any
    body: Any
    client: str
    key: str  # of the request: the same key is done only once; "": none was given
    asked: str = ""  # stands for method, path and body

    @property
    def operator(self) -> bool:
        """Whether the caller runs the site; others get what the policy gives users."""
        return self.token.role == "admin"

    def sees(self, team: str) -> bool:
        """Whether the caller may know of a team's jobs."""
        return may_see(self.token, team)

    def job(self) -> ClusterJob:
        """The job in the path. One of another team is not there, as far as the caller knows."""
        job = self.leading.core.view.jobs.get(self.path.job)
        if job is None or not self.sees(job.spec.team):
            raise ApiError(404, "no_such_job", f"there is no job {self.path.job}")
        return job

    def node(self) -> int:
        """The node in the path."""
        return self.node_number(self.path.node)

    def node_number(self, name: str) -> int:
        """A node by its name."""
        found = self.leading.core.view.fleet.index.get(name)
        if found is None:
            raise ApiError(404, "no_such_node", f"there is no node {name}")
        return found

    async def helped(self, function: Callable[..., T], *args: Any) -> T:
        """What a function answers that would hold the server up: the helper process is asked."""
        return await in_time(self.server.helper.call(function, *args))

    async def order(self, body: EventBody) -> Done:
        """Has an order stored and handled; refused ones are a conflict with the state."""
        key = f"{self.token.id}:{self.key}" if self.key else ""
        try:
            outcome = await self.leading.controller.order(body, key, self.asked)
        except ReusedError:
            text = f"Idempotency-Key {self.key} was another request's: take a new one for this"
            raise ApiError(409, "key_reused", text) from None
        if not outcome.accepted:
            raise ApiError(409, outcome.reason.code, str(outcome.reason))
        return Done(
            accepted=True,
            message=str(outcome.reason),
            sequence=outcome.sequence,
            jobs=outcome.jobs,
        )


async def in_time(work: Awaitable[T]) -> T:
    """What the helper process answers; ApiError where it has no time for it."""
    try:
        return await work
    except BusyError as error:
        raise ApiError(429, "too_many_requests", str(error), 2.0) from None
    except TooLongError as error:
        raise ApiError(422, "too_long", str(error)) from None


Handler = Callable[[Call], Awaitable[object]]
H = TypeVar("H", bound=Handler)


class Endpoint(Struct, frozen=True, kw_only=True):
    """One operation. ``roles`` (): anybody, without a token."""

    method: str
    path: str
    name: str
    summary: str
    roles: tuple[Role, ...]
    handler: Handler
    answer: Any = None  # None: a stream of text
    params: Any = None
    query: Any = None
    body: Any = None
    optional_body: bool = False  # all of it may be left out
    status: int = 200
    audited: bool = False


class Endpoints(list[Endpoint]):
    """Operations by their handlers, whose name, first line and answer the API shows."""

    def add(
        self,
        route: str,
        roles: tuple[Role, ...],
        *,
        params: Any = None,
        query: Any = None,
        body: Any = None,
        optional_body: bool = False,
        status: int = 200,
        audited: bool = False,
    ) -> Callable[[H], H]:
        """Has the function below answer a route (``GET /v1/jobs/{job}``)."""

        def added(handler: H) -> H:
            method, _, path = route.partition(" ")
            answer = get_type_hints(handler)["return"]
            self.append(
                Endpoint(
                    method=method,
                    path=path,
                    name=handler.__name__,
                    summary=(handler.__doc__ or "").partition("\n")[0],
                    roles=roles,
                    handler=handler,
                    answer=None if answer == AsyncIterator[bytes] else answer,
                    params=params,
                    query=query,
                    body=body,
                    optional_body=optional_body,
                    status=status,
                    audited=audited,
                )
            )
            return handler

        return added


def wrong_team(team: str, own: str) -> AuthError:
    """Somebody acts for a team that is not theirs."""
    return AuthError(403, "wrong_team", f"this token is for team {own}, not for {team}")
