"""The HTTP side: routes from the table of endpoints, every refusal as JSON with its status."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Match, Route, WebSocketRoute
from starlette.types import Receive, Scope, Send

from phalanx.control.server.api import alerts as api_alerts
from phalanx.control.server.api import details as api_details
from phalanx.control.server.api import drafts as api_drafts
from phalanx.control.server.api import job_orders as api_job_orders
from phalanx.control.server.api import jobs as api_jobs
from phalanx.control.server.api import ledger as api_ledger
from phalanx.control.server.api import logs as api_logs
from phalanx.control.server.api import metrics as api_metrics
from phalanx.control.server.api import nodes as api_nodes
from phalanx.control.server.api import page as api_page
from phalanx.control.server.api import plan as api_plan
from phalanx.control.server.api import prometheus as api_prometheus
from phalanx.control.server.api import runs as api_runs
from phalanx.control.server.api import saved_views as api_saved_views
from phalanx.control.server.api import server as api_server
from phalanx.control.server.api.workflows import pipelines as api_pipelines
from phalanx.control.server.api.workflows import sweeps as api_sweeps
from phalanx.control.server.controller import UnavailableError
from phalanx.control.server.http import page_files
from phalanx.control.server.http.endpoints import ApiError, Call, Endpoint, Endpoints
from phalanx.control.server.http.live import serve_live
from phalanx.control.server.http.openapi import document
from phalanx.control.server.http.shells import serve_shell
from phalanx.control.server.security.auth import AuthError, Token, bearer, require
from phalanx.control.server.security.body_limits import OversizedBodyError, read_body
from phalanx.control.server.security.sessions import while_good
from phalanx.control.server.store.interface import StoreError
from phalanx.control.wire.api_types import WORD, Done, Failure, Health, Problem

if TYPE_CHECKING:
    from phalanx.control.server.process import Server

ENDPOINTS = Endpoints(
    [
        *api_jobs.ENDPOINTS,
        *api_job_orders.ENDPOINTS,
        *api_logs.ENDPOINTS,
        *api_nodes.ENDPOINTS,
        *api_metrics.ENDPOINTS,
        *api_details.ENDPOINTS,
        *api_ledger.ENDPOINTS,
        *api_runs.ENDPOINTS,
        *api_sweeps.ENDPOINTS,
        *api_prometheus.ENDPOINTS,
        *api_server.ENDPOINTS,
        *api_page.ENDPOINTS,
        *api_pipelines.ENDPOINTS,
        *api_plan.ENDPOINTS,
        *api_drafts.ENDPOINTS,
        *api_alerts.ENDPOINTS,
        *api_saved_views.ENDPOINTS,
    ]
)
RESOURCE = "phalanx.resource"  # what a request was found to be for, in its scope
KEY = re.compile(r"[A-Za-z0-9._-]{1,128}")
HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


def json_response(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Any:
    """An answer as JSON."""
    body = msgspec.json.encode(value)
    return Response(body, status, {**HEADERS, **(headers or {})}, "application/json")


def failure(status: int, code: str, message: str, retry_after: float = 0.0) -> Any:
    """A refusal as JSON."""
    headers = {"Retry-After": str(max(1, round(retry_after)))} if retry_after else {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(Failure(error=Problem(code=code, message=message)), status, headers)


def make_app(server: Server) -> Starlette:
    """The whole application but for agents, who have a way of their own (front.py)."""
    by_path: dict[str, dict[str, Endpoint]] = {}
    for each in ENDPOINTS:
        by_path.setdefault(each.path, {})[each.method] = each
    resources = [_Resource(server, path, known) for path, known in by_path.items()]
    routes: list[BaseRoute] = [_ByWord(resources), *page_files.routes()]
    routes.append(WebSocketRoute("/v1/live", lambda socket: serve_live(server, socket)))
    shell = "/v1/jobs/{job}/shell"
    routes.append(WebSocketRoute(shell, lambda socket: serve_shell(server, socket)))
    app = Starlette(routes=routes, exception_handlers={HTTPException: _http, Exception: _bug})
    app.router.redirect_slashes = False  # a path is what the document says, or nothing
    return app


class _Resource(Route):
    """One path with all its methods, and no others: not even HEAD, which the document lacks."""

    def __init__(self, server: Server, path: str, endpoints: dict[str, Endpoint]) -> None:
        handlers = {method: _route(server, endpoint) for method, endpoint in endpoints.items()}

        async def handle(request: Request) -> Any:
            return await handlers[request.method](request)

        super().__init__(path, handle, methods=list(endpoints))
        self.methods = set(endpoints)


class _ByWord(BaseRoute):
    """All resources, found by the word behind their version: there are dozens, of few words."""

    def __init__(self, resources: list[_Resource]) -> None:
        self._resources: dict[str, list[_Resource]] = {}
        for each in resources:
            self._resources.setdefault(_word(each.path), []).append(each)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        partial: tuple[Match, Scope] = (Match.NONE, {})
        for each in self._resources.get(_word(scope["path"]), ()):
            match, found = each.matches(scope)
            if match is Match.FULL:
                return match, {**found, RESOURCE: each}
            if match is Match.PARTIAL and partial[0] is Match.NONE:
                partial = match, {**found, RESOURCE: each}
        return partial

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await scope[RESOURCE].handle(scope, receive, send)


def _word(path: str) -> str:
    """``jobs`` of /v1/jobs/7, and of paths without a version the first word."""
    words = path.split("/", 3)
    return words[2] if len(words) > 2 else words[-1]


@ENDPOINTS.add("GET /healthz", ())
async def healthz(_: Call) -> Health:
    """Say that the server is there."""
    return Health(ok=True)


@ENDPOINTS.add("GET /v1/openapi.json", ())
async def openapi(_: Call) -> dict[str, Any]:
    """Describe this API."""
    return document(ENDPOINTS)


def _route(server: Server, endpoint: Endpoint) -> Callable[[Request], Awaitable[Any]]:
    async def handle(request: Request) -> Any:
        client = request.client.host if request.client else ""
        token: Token | None = None
        detail = ""
        try:
            token = _authenticate(server, endpoint, request, client)
            if token is not None:
                require(token, endpoint.roles)
            call = await _decode(server, endpoint, request, client, token)
            answer = await endpoint.handler(call)
        except (AuthError, ApiError) as error:
            retry = getattr(error, "retry_after", 0.0)
            response = failure(error.status, error.code, str(error), retry)
        except (UnavailableError, StoreError) as error:
            response = failure(503, "unavailable", f"nothing can be stored now: {error}", 1.0)
        except ClientDisconnect:
            response = failure(400, "bad_request", "the body ended early")
        else:
            if endpoint.answer is None and token is not None:
                answer = while_good(call.leading.tokens, token.id, answer)  # type: ignore[arg-type]
            response = _response(endpoint, answer)
            made = [f"job {job}" for job in answer.jobs] if isinstance(answer, Done) else []
            why = getattr(call.body, "why", "")  # a person's reason stands in the audit log
            detail = ", ".join([*made, *([f"because {why}"] if why else [])])
        status = response.status_code
        if token is not None and 400 <= status < 500 and status != 429:
            server.limits.refusals.take(token.id, time.monotonic())
        _write_audit(server, endpoint, request, client, token, status, detail)
        return response

    return handle


def _response(endpoint: Endpoint, answer: object) -> Any:
    if endpoint.answer is None:
        stream: AsyncIterator[bytes] = answer  # type: ignore[assignment]
        return StreamingResponse(stream, endpoint.status, HEADERS, "text/plain; charset=utf-8")
    return json_response(answer, endpoint.status)


def _write_audit(
    server: Server,
    endpoint: Endpoint,
    request: Request,
    client: str,
    token: Token | None,
    status: int,
    detail: str,
) -> None:
    if endpoint.audited or status in (401, 403):
        server.audit.write(
            f"{endpoint.method} {request.url.path}",
            status,
            token=token.id if token else "",
            name=token.name if token else "",
            role=token.role if token else "",
            client=client,
            detail=detail,
            kind=f"{endpoint.method} {endpoint.path}",
        )


def _authenticate(
    server: Server, endpoint: Endpoint, request: Request, client: str
) -> Token | None:
    now = time.monotonic()
    if not endpoint.roles:
        _limit(server.limits.tokens.take(client, now))
        return None
    leading = server.leading_or_refuse()
    try:
        token = leading.tokens.check(bearer(request.headers.get("authorization")))
    except AuthError:
        _limit(server.limits.addresses.take(client, now))
        raise
    server.gate.passed(request.scope.get("client"))
    if token.role != "join":  # a whole fleet joins with one token
        length = request.headers.get("content-length", "")
        size = int(length) if length.isdigit() and len(length) < 20 else 0
        _limit(server.limits.take(token.id, now, order=endpoint.audited, length=size))
    return token


def _limit(wait_seconds: float) -> None:
    if wait_seconds:
        text = f"too many requests: wait {wait_seconds:.1f} s"
        raise ApiError(429, "too_many_requests", text, wait_seconds)


async def _decode(
    server: Server, endpoint: Endpoint, request: Request, client: str, token: Token | None
) -> Call:
    key = request.headers.get("idempotency-key")
    if key is not None and not KEY.fullmatch(key):
        raise ApiError(400, "bad_request", "Idempotency-Key: 1 to 128 letters, digits, . _ -")
    try:
        path = _convert(endpoint.params, request.path_params)
        query = _query(endpoint, request)
        body = None
        data = await _read(request, server.limits.most_body_bytes)
        if endpoint.optional_body and not data:
            body = endpoint.body()
        elif endpoint.body is not None:
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise ApiError(415, "not_json", "send JSON: Content-Type: application/json")
            body = _body(data, endpoint.body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, OversizedBodyError) as error:
        raise ApiError(400, "bad_request", _plain(str(error))) from None
    return Call(
        server=server,
        leading=server.leading,  # type: ignore[arg-type]
        token=token,  # type: ignore[arg-type]
        path=path,
        query=query,
        body=body,
        client=client,
        key=key or "",
        asked=_content(request, data) if key else "",
    )


def _content(request: Request, body: bytes) -> str:
    """What stands for a request's content; whoever asks again sends the same bytes."""
    told = f"{request.method} {request.url.path}?{request.url.query}\n".encode() + body
    return hashlib.blake2b(told, digest_size=12).hexdigest()


def _plain(problem: str) -> str:
    """msgspec's words with the name of the field before what is wrong with it."""
    rule, _, where = problem.partition(" - at `$.")
    rule = rule.replace(f"matching regex {WORD!r}", "of letters, digits and . _ @ -")
    return f"{where.rstrip('`')}: {rule[:1].lower()}{rule[1:]}" if where else problem


def _body(data: bytes, struct: Any) -> Any:
    plain = read_body(data)
    try:
        return msgspec.json.decode(data, type=struct)
    except msgspec.ValidationError:
        # 3.0 is an integer in JSON Schema, and some languages know no other numbers.
        return msgspec.convert(_whole(plain), struct)


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _whole(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_whole(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _query(endpoint: Endpoint, request: Request) -> Any:
    given = request.query_params.multi_items()
    names = [name for name, _ in given]
    if len(set(names)) < len(names):
        raise ApiError(400, "bad_request", "a parameter is given twice")
    if endpoint.query is None and given:
        raise ApiError(400, "bad_request", f"there is no parameter {names[0]}")
    return _convert(endpoint.query, dict(given))


def _convert(struct: Any, values: dict[str, Any]) -> Any:
    return None if struct is None else msgspec.convert(values, struct, strict=False)


async def _read(request: Request, most_bytes: int) -> bytes:
    too_large = ApiError(413, "too_large", f"at most {most_bytes} bytes are taken")
    if "transfer-encoding" in request.headers:  # what it costs is known before it is read
        raise ApiError(411, "length_required", "say how long the body is: Content-Length")
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > most_bytes:
        raise too_large
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most_bytes:
            raise too_large
        parts.append(part)
    return b"".join(parts)


async def _http(request: Request, error: Exception) -> Any:
    assert isinstance(error, HTTPException)
    codes = {404: "not_found", 405: "wrong_method"}
    response = failure(error.status_code, codes.get(error.status_code, "refused"), error.detail)
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    return response


async def _bug(request: Request, error: Exception) -> Any:
    return failure(500, "internal", "an error in the server; its log says more")
