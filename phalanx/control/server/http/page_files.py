"""Routes of the page's files. They are looked up by name: there is no folder to walk out of."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from phalanx.observe import page

COMMON = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
SHELL = {
    **COMMON,
    "Content-Security-Policy": page.POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
# The hash in the path changes with the content.
FOREVER = {
    **COMMON,
    "Cache-Control": "public, max-age=31536000, immutable",
    "Vary": "Accept-Encoding",
}


def routes() -> list[BaseRoute]:
    """The shell at /, everything else under the version's hash."""
    files = page.load()
    base = f"/page/{files.version}/"

    async def shell(request: Request) -> Response:
        return _send(request, files.index, SHELL)

    async def file(request: Request) -> Response:
        asset = files.files.get(request.url.path.removeprefix(base))
        if asset is None:
            return Response("no such file of this version: reload the page", 404, COMMON)
        return _send(request, asset, FOREVER)

    return [
        Route("/", shell, methods=["GET"]),
        Route("/page/{path:path}", file, methods=["GET"]),
    ]


def _send(request: Request, asset: page.Asset, headers: dict[str, str]) -> Response:
    if asset.zipped and "gzip" in request.headers.get("accept-encoding", ""):
        return Response(
            asset.zipped, headers={**headers, "Content-Encoding": "gzip"}, media_type=asset.kind
        )
    return Response(asset.data, headers=headers, media_type=asset.kind)
