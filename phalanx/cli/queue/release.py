"""``phalanx release``: let held jobs into the queue."""

from __future__ import annotations

from phalanx.cli.queue.job_orders import order_command

app = order_command(
    "release", "Let held jobs into the queue; what an operator holds only an operator releases."
)
