"""``phalanx ledger``: where GPU time went."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.cli.completion import job_numbers
from phalanx.cli.connection import connected
from phalanx.cli.options import Json, ServerUrl, State
from phalanx.cli.output import fail, print_json
from phalanx.cli.tables import add_row, print_table, table

app = typer.Typer()


@app.command()
def ledger(
    job: Annotated[
        int, typer.Argument(min=0, help="A job (default: everything).", autocompletion=job_numbers)
    ] = 0,
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Show where GPU time went: buckets of GPU-nanoseconds that sum exactly to the allocation."""
    with connected(server, json, state) as client:
        path = f"/v1/jobs/{job}/ledger" if job else "/v1/ledger/timeline"
        book = client.get(path, dict)
    if json:
        print_json(book)
        return
    total = int(book["allocation_gpu_ns"])
    shown = table("bucket", "GPU-hours", "share")
    buckets = {name: int(text) for name, text in book["buckets"].items()}
    for name, gpu_ns in buckets.items():
        if gpu_ns:
            words = f"{name} (estimated)" if name in book["estimated"] else name
            add_row(shown, words, f"{gpu_ns / 3.6e12:.4f}", f"{gpu_ns / total:.2%}")
    add_row(shown, "allocation", f"{total / 3.6e12:.4f}", "100.00%")
    print_table(shown)
    if buckets.get("productive") and not buckets.get("exposed_communication"):
        print("productive time is whole steps: no plan says how much of them is communication")
    if buckets.get("unreported"):
        print("unreported time is of programs that report no steps: phalanx.worker() would tell")
    achieved = "goodput and ETTR are unknown"
    if book["goodput"] is not None:
        achieved = f"goodput {book['goodput']:.2%}, ETTR {book['ettr']:.2%}"
    print(f"{achieved}, ${book['dollars']:.2f}")
    if sum(buckets.values()) != total:
        fail("the buckets do not sum to the allocation")
