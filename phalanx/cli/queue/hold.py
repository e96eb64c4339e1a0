"""``phalanx hold``: keep jobs that wait out of the queue."""

from __future__ import annotations

from phalanx.cli.queue.job_orders import order_command

app = order_command("hold", "Keep jobs that wait out of the queue until they are released.")
