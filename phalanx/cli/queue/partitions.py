"""``phalanx partitions``: nodes in groups, who may use them and what waits for them."""

from __future__ import annotations

import typer

from phalanx.cli.connection import connected
from phalanx.cli.options import Json, ServerUrl, State
from phalanx.cli.output import print_json
from phalanx.cli.tables import add_row, print_table, span, table
from phalanx.control.wire.api_types import PartitionList

app = typer.Typer()


@app.command()
def partitions(server: ServerUrl = "", state: State = None, json: Json = False) -> None:
    """List partitions: free and all nodes and GPUs, rules of the policy, jobs that name them."""
    with connected(server, json, state) as client:
        listed = client.get("/v1/partitions", PartitionList)
    if json:
        print_json(listed)
        return
    made = table("PARTITION", "NODES", "GPUS", "TEAMS", "LONGEST", "PRIORITY", "PENDING", "RUNNING")
    for each in listed.partitions:
        add_row(
            made,
            each.name,
            f"{each.free_nodes}/{each.nodes}",
            f"{each.free_gpus}/{each.gpus}",
            ", ".join(each.teams) or "all",
            span(each.most_seconds) if each.most_seconds else "-",
            each.priority,
            each.pending,
            each.running,
        )
    print_table(made)
