"""``phalanx alerts``: rules in plain words, and who is told."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import Annotated, Any
from urllib.parse import quote

import typer

from phalanx.cli.connection import REFUSED, connected
from phalanx.cli.options import Json, ServerUrl, State
from phalanx.cli.output import print_json
from phalanx.cli.tables import add_row, plain, print_table, table, when

app = typer.Typer(
    no_args_is_help=True, help="Manage alert rules: list, set, silence, test, remove."
)

Name = Annotated[str, typer.Argument(help="Of the rule.")]
Tell = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ADDRESS", help="https://…, slack:https://… or mail:ann@example.org; repeatable."
    ),
]


class AlertKind(StrEnum):
    """What a rule is about."""

    finding = "finding"
    goodput_below = "goodput-below"
    node_flapping = "node-flapping"
    budget_above = "budget-above"


def _path(name: str, *rest: str) -> str:
    return "/".join([f"/v1/alerts/{quote(name, safe='')}", *rest])


@app.command("ls")
def list_rules(server: ServerUrl = "", state: State = None, json: Json = False) -> None:
    """List the rules and the last alert of each."""
    with connected(server, json, state) as client:
        listed: dict[str, Any] = client.get("/v1/alerts", dict)
    if json:
        print_json(listed)
        return
    made = table("ALERT", "WHEN", "TELLS", "NOW", "SILENT UNTIL", "BY")
    for each in listed["alerts"]:
        silent = when(int(each["silent_until"] * 1e9)) if each["silent_until"] else "-"
        tells, now = ", ".join(each["targets"]) or "the page", len(each["since"]) or "-"
        add_row(made, each["name"], each["words"], tells, now, silent, each["by"])
    print_table(made) if listed["alerts"] else print("no alert is set: `phalanx alerts set --help`")
    for each in listed["fired"][-10:]:
        quiet = " (silenced)" if each["silenced"] else ""
        print(plain(f"{when(int(each['time'] * 1e9))}  {each['rule']}: {each['text']}{quiet}"))


@app.command("set")
def set_rule(
    name: Name,
    rule: Annotated[AlertKind, typer.Argument(help="Condition to watch.")],
    finding: Annotated[str, typer.Option(help="Kind of finding, e.g. loss_spike.")] = "",
    threshold: Annotated[
        float,
        typer.Option(min=0, help="Fraction (goodput, budget: 0.8) or, for flapping, a count."),
    ] = 0.0,
    minutes: Annotated[
        float, typer.Option(min=1, help="Length of the window that it evaluates.")
    ] = 60.0,
    job: Annotated[int, typer.Option(min=0, help="Only this job; 0: all that you can see.")] = 0,
    tell: Tell = None,
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Set a rule: NAME finding --finding loss_spike --tell slack:https://…"""
    body = {
        "kind": rule.value.replace("-", "_"),
        "finding": finding,
        "threshold": threshold,
        "minutes": minutes,
        "job": job,
        "targets": tell or [],
    }
    with connected(server, json, state) as client:
        made: dict[str, Any] = client.put(_path(name), body, dict)
    print_json(made) if json else print(plain(f"alert {name}: {made['words']}"))


@app.command()
def silence(
    name: Name,
    minutes: Annotated[float, typer.Argument(min=0, help="Duration; 0: end the silence.")],
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Silence a rule for a while."""
    with connected(server, json, state) as client:
        made: dict[str, Any] = client.post(_path(name, "silence"), {"minutes": minutes}, dict)
    print_json(made) if json else print(plain(f"alert {name}: silent for {minutes:g} minutes"))


@app.command("test")
def try_rule(name: Name, server: ServerUrl = "", state: State = None, json: Json = False) -> None:
    """Send a test message to every recipient of a rule; exit with 1 if one does not arrive."""
    with connected(server, json, state) as client:
        tried: list[dict[str, str]] = client.post(_path(name, "test"), None, dict)["tried"]
    if json:
        print_json(tried)
    for each in () if json else tried:
        print(plain(f"{each['target']}: {each['problem'] or 'it arrived'}"))
    if not tried and not json:
        print("it tells nobody: the page lists it", file=sys.stderr)
    if any(each["problem"] for each in tried):
        raise typer.Exit(REFUSED)


@app.command()
def rm(name: Name, server: ServerUrl = "", state: State = None, json: Json = False) -> None:
    """Remove a rule."""
    with connected(server, json, state) as client:
        left: dict[str, Any] = client.delete(_path(name), dict)
    print_json(left) if json else print(plain(f"alert {name} is gone"))
