"""``phalanx release``: let held jobs into the queue."""

from __future__ import annotations

from phalanx.cli.queue.job_orders import order_command

app = order_command(
    "release",
    "Release held jobs into the queue; only an operator can release what an operator held.",
)
