"""Views of the page that people keep by name: an address with its filters and its time range."""

from __future__ import annotations

import time
from typing import Annotated

import msgspec
from msgspec import Meta

from phalanx.control.server.http.endpoints import EVERYBODY, WRITERS, ApiError, Call, Endpoints
from phalanx.control.wire import api_types as t

KIND = "view"
MOST_VIEWS = 500  # of a team: what one keeps takes nothing from another


class SavedViewIn(t.In, frozen=True):
    address: Annotated[str, Meta(pattern=r"^#/[!-~]*$", max_length=2000)]  # behind the page's own


class SavedView(t.Out, frozen=True):
    """``team``: whose people see it; "": everybody."""

    name: str
    address: str
    by: str
    team: str
    time: float  # seconds since 1970


class SavedViews(t.Out, frozen=True):
    views: list[SavedView]


ENDPOINTS = Endpoints()
_saved = msgspec.json.Decoder(SavedView).decode


async def _all(call: Call) -> list[SavedView]:
    rows = await call.server.read(call.server.journal.kept, KIND)
    return [_saved(body) for _, body in rows]


def _seen(call: Call, view: SavedView) -> bool:
    return not view.team or call.sees(view.team)


def _may_change(call: Call, view: SavedView) -> None:
    """Users change what their own team keeps; what everybody sees, operators."""
    if not (call.operator or view.team == call.token.team):
        text = f"{view.by} keeps the view {view.name}: keep yours under another name"
        raise ApiError(403, "wrong_team", text)


@ENDPOINTS.add("GET /v1/views", EVERYBODY)
async def list_views(call: Call) -> SavedViews:
    """List saved views."""
    return SavedViews(views=[view for view in await _all(call) if _seen(call, view)])


@ENDPOINTS.add("PUT /v1/views/{name}", WRITERS, params=t.NamePath, body=SavedViewIn, audited=True)
async def save_view(call: Call) -> SavedView:
    """Save a view under a name."""
    name, token, views = call.path.name, call.token, await _all(call)
    by_name = {view.name: view for view in views}
    if name in by_name and not _seen(call, by_name[name]):
        raise ApiError(409, "name_taken", f"another team keeps a view called {name}")
    if name in by_name:
        _may_change(call, by_name[name])
    own = sum(view.team == token.team for view in views)
    if name not in by_name and own >= MOST_VIEWS:
        raise ApiError(409, "too_many", f"your team keeps {own} views: remove one first")
    made = SavedView(
        name=name, address=call.body.address, by=token.name, team=token.team, time=time.time()
    )
    body = msgspec.json.encode(made)
    await call.server.read(call.server.journal.keep, KIND, name, body)
    return made


@ENDPOINTS.add("DELETE /v1/views/{name}", WRITERS, params=t.NamePath, audited=True)
async def drop_view(call: Call) -> SavedViews:
    """Delete a saved view."""
    known = next((view for view in await _all(call) if view.name == call.path.name), None)
    if known is None or not _seen(call, known):
        raise ApiError(404, "no_such_view", f"there is no view {call.path.name}")
    _may_change(call, known)
    await call.server.read(call.server.journal.drop, KIND, call.path.name)
    return await list_views(call)
