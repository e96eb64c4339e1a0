"""The page: a few files, served by name; nothing from outside this server."""

from __future__ import annotations

from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def routes() -> list[BaseRoute]:
    """One route a file; there is no folder to walk out of."""
    return [Route(path, _file(*known), methods=["GET"]) for path, known in FILES.items()]


def _file(name: str, kind: str):  # type: ignore[no-untyped-def]
    data = resources.files(__package__).joinpath(name).read_bytes()

    async def send(request: Request) -> Response:
        return Response(data, headers=HEADERS, media_type=kind)

    return send
