"""Traces of a running job's next steps, merged for Perfetto."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from phalanx.cli.connection import connected
from phalanx.cli.output import exit_on, print_json, write_out
from phalanx.cli.progress import working
from phalanx.control.client.client import Client, ClientError
from phalanx.control.wire.api_types import RefusalCode
from phalanx.observe.tracker.traces import merge_traces, trace_of

Trace = dict[str, Any]


def trace_running(
    job: int,
    steps: int,
    ranks: str,
    out: Path | None,
    seconds: float,
    server: str,
    state: Path | None,
    json: bool,
) -> None:
    """The next steps of some ranks of a running job, merged on one clock."""
    try:
        chosen = [int(word) for word in ranks.split(",") if word]
    except ValueError:
        raise typer.BadParameter("numbers with commas between them", param_hint="--ranks") from None
    with connected(server, json, state) as client:
        body = {"steps": steps, "ranks": chosen}
        asked = client.post(f"/v1/jobs/{job}/profile", body, dict)
        with exit_on(ValueError):
            with working(f"wait for {steps} steps of {len(asked['ranks'])} ranks", json) as share:
                traces = _wait(client, job, asked, seconds, share)
            skew = {int(rank): value for rank, value in asked["clock_skew_seconds"].items()}
            merged = merge_traces(traces, skew)
    path = out or Path(f"profile-{job}.json")
    write_out(path, merged)
    if json:
        print_json({"file": str(path), "ranks": sorted(traces)})
    else:
        print(f"{path}: {len(traces)} ranks; open it at https://ui.perfetto.dev")


def _wait(
    client: Client,
    job: int,
    asked: dict[str, Any],
    seconds: float,
    share: Callable[[float], None],
) -> dict[int, Trace]:
    """The traces, once all of them are there."""
    deadline, traces = time.monotonic() + seconds, dict[int, Trace]()
    while True:
        for rank in asked["ranks"]:
            if rank in traces:
                continue
            try:
                pieces = client.stream(f"/v1/jobs/{job}/traces/{rank}", after_ns=asked["asked_ns"])
                traces[rank] = trace_of(b"".join(pieces), f"rank {rank}")
                share(len(traces) / len(asked["ranks"]))
            except ClientError as error:
                if error.code not in (RefusalCode.NO_SUCH_TRACE, RefusalCode.NOT_RUNNING):
                    raise
        if len(traces) == len(asked["ranks"]):
            return traces
        if time.monotonic() > deadline:
            late = ", ".join(str(rank) for rank in asked["ranks"] if rank not in traces)
            raise ValueError(f"no trace of rank {late} within {seconds:.0f} s")
        time.sleep(0.5)
