"""``phalanx hold``: keep jobs that wait out of the queue."""

from __future__ import annotations

from phalanx.cli.queue.job_orders import order_command

app = order_command("hold", "Hold queued jobs, so that they do not start until they are released.")
