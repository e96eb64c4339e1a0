"""README's table: what is claimed, what was measured, the command. Written by ``make proof``."""

from __future__ import annotations

import re

from proof.claims import CLAIMS
from proof.history import Measurement

BEGIN, END = "<!-- claims: written by `make proof` -->", "<!-- end of claims -->"
TABLE = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
# Which claims, and of each the figures that say most.
HEADLINES: dict[str, tuple[str, ...]] = {
    "first-step": ("median_seconds",),
    "parity": ("loss_difference",),
    "recovery": ("worker_median", "worker_worst", "worker_steps_again"),
    "snapshots": ("stall_share",),
    "endurance": ("kills", "differences"),
    "verification": ("named", "cost_share"),
    "chaos": ("violations",),
    "simulate": ("llama3_54d_interruptions",),
    "plan": ("dense_error",),
    "slurm": ("times_faster",),
    "controller": ("order_p99_ms",),
    "speed-1b": ("ratio",),
    "speed-3b": ("ratio",),
    "speed-3b-fp8": ("ratio",),
}


def with_table(readme: str, shown: dict[str, Measurement]) -> str:
    """README with its table renewed."""
    return TABLE.sub(lambda _: "\n".join([BEGIN, *_rows(shown), END]), readme)


def _rows(shown: dict[str, Measurement]) -> list[str]:
    rows = ["| what we claim | what we measured | the command |", "|---|---|---|"]
    for name, figures in HEADLINES.items():
        claim, measurement = CLAIMS[name], shown.get(name)
        measured = [_measured(name, figure, measurement) for figure in figures]
        rows.append(f"| {claim.says} | {'; '.join(measured)} | `{claim.command}` |")
    return rows


def _measured(name: str, figure: str, measurement: Measurement | None) -> str:
    known = CLAIMS[name].figure(figure)
    bar = f" (bar {known.bar})" if known.bar else ""
    if measurement is None or figure not in measurement.figures:
        return f"{known.says}: not measured{bar}"
    value = known.show(measurement.figures[figure])
    return f'{known.says}: [{value}](docs/evidence.md#{name} "{name}.{figure}"){bar}'
