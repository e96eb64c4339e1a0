"""``phalanx doctor drift``: which nodes differ from most of their kind, and since when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.connection import connected
from phalanx.cli.options import Json, ServerUrl, State
from phalanx.cli.output import print_json

if TYPE_CHECKING:
    from phalanx.control.wire.api_types import DriftOut
    from phalanx.doctor.drift import Difference

DRIFTED = 1  # exit code


def drift(
    node: Annotated[str, typer.Option(metavar="NODE", help="Only this node.")] = "",
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Name nodes that differ from most of their kind in version, setting or speed.

    Exit code 0: none does, 1: some do.
    """
    from phalanx.control.wire.api_types import DriftOut

    with connected(server, json, state) as client:
        differing = client.get("/v1/drift", DriftOut, node=node or None)
    if json:
        print_json(differing)
    else:
        _show(differing)
    if differing.differences:
        raise typer.Exit(DRIFTED)


def _show(differing: DriftOut) -> None:
    from phalanx.cli.tables import counted, plain

    for each in differing.differences:
        print(plain(difference_in_words(each)))
    for what in differing.undecided:
        print(
            plain(
                f"nobody is named  {what.aspect} {what.key}: {what.values} values among "
                f"{what.nodes} nodes{_of(what.kind)}: {what.why}"
            )
        )
    for kind, nodes in differing.compared.items():
        print(f"{counted(nodes, 'node')}{_of(kind)} compared")
    if differing.silent:
        shown = ", ".join(differing.silent[:8]) + (" …" if len(differing.silent) > 8 else "")
        print(plain(f"settings of {len(differing.silent)} nodes are not known yet: {shown}"))
    if not differing.differences:
        print("nobody differs from a majority")


def _of(kind: str) -> str:
    return f" of {kind}" if kind else ""


def difference_in_words(each: Difference) -> str:
    """A difference for a person."""
    from datetime import UTC, datetime

    since = f"{datetime.fromtimestamp(each.since_ns / 1e9, UTC):%Y-%m-%d %H:%M} UTC"
    value = f"{each.value} ({each.share:.0%})" if each.aspect == "speed" else each.value
    before = f"; {each.before} before" if each.before else ""
    return (
        f"{each.node}  {each.aspect} {each.key}: {value}, and {each.usual} on {each.alike} of "
        f"{each.nodes} nodes{_of(each.kind)}, since {since}{before}"
    )
