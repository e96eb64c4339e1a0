"""``phalanx failures``: how often nodes fail here."""

from __future__ import annotations

import typer

from phalanx.cli.connection import connected
from phalanx.cli.options import Json, ServerUrl, State
from phalanx.cli.output import print_json
from phalanx.cli.tables import add_row, print_table, table
from phalanx.control.wire.api_types import FailureRates

app = typer.Typer()


@app.command()
def failures(server: ServerUrl = "", state: State = None, json: Json = False) -> None:
    """Show this cluster's failure rates by cause; checkpoint intervals follow from them."""
    with connected(server, json, state) as client:
        listed = client.get("/v1/failure-rates", FailureRates)
    if json:
        print_json(listed)
        return
    if not listed.rates:
        print("no gang has run yet: jobs go by the policy's rate")
        return
    made = table("KIND", "FAILURES", "NODE-DAYS", "PER 1000", "80 %", "NOW", "PRIOR", "CAUSES")
    for each in listed.rates:
        between = f"{each.low:.2f}-{each.high:.2f}"
        causes = ", ".join(f"{cause} {count}" for cause, count in each.causes.items())
        rates = (each.per_1000_node_days, each.nodes_per_1000, each.prior)
        rate, now, prior = (f"{value:.2f}" for value in rates)
        seen = (each.failures, f"{each.node_days:.1f}", rate, between)
        add_row(made, each.kind or "-", *seen, now, prior, causes or "-")
    print_table(made)
    aged = table("KIND", "AGE", "FAILURES", "NODE-DAYS", "PER 1000", "80 %")
    for each in listed.rates:
        for age in each.ages:
            days, rate = f"{age.node_days:.1f}", f"{age.per_1000_node_days:.2f}"
            between = f"{age.low:.2f}-{age.high:.2f}"
            add_row(aged, each.kind or "-", age.age, age.failures, days, rate, between)
    if any(each.ages for each in listed.rates):
        print_table(aged)
    print("of nodes with eight GPUs, per 1000 days; NOW: the mean of those there, by age and past")
